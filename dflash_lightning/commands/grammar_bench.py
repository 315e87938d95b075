"""What can be said to the commands of the bench."""

from __future__ import annotations

import argparse

from dflash_lightning.commands.argument_types import count
from dflash_lightning.commands.grammar_decode import Adder

SWEEP_FOLDER = "runs/sweep"


def add_bench(add: Adder) -> None:
    """The three commands, in the order in which one uses them."""
    _add_measure(add)
    _add_sweep(add)
    _add_compare(add)


def _add_measure(add: Adder) -> None:
    text = """\
Measure finished runs as their recipes say (the group measure; without one: measure=bench): tau by domain for every way
to decode, speed at several batch sizes beside plain decoding, identity with it, answers that repeat themselves. The
figures go to RUN/measured.json, for dflash compare. A run that is measured already is left alone unless its weights or
the settings have changed.

  dflash measure runs/bench/dspark
  dflash measure runs/sweep/* measure.limit=8
  dflash measure runs/a measure.prompts.code=my_prompts.jsonl --again
  dflash measure runs/block_16 decoding.block_size=8 --to runs/block_16_at_8

The exit status is 1 when output is not the target's own."""
    parser = add("measure", "measure finished runs for a comparison", text)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run folders; behind them measure.KEY=VALUE changes settings"
    )
    parser.set_defaults(overrides=[])
    parser.add_argument(
        "--to", metavar="FOLDER", help="measure a copy of RUN that is fed otherwise: decoding.block_size=N behind RUN"
    )
    parser.add_argument("--again", action="store_true", help="measure what is measured already, too")
    _add_device(parser)


def _add_sweep(add: Adder) -> None:
    text = f"""\
Train and measure every combination of recipes, settings and seeds. A word with several values is an axis. Every point
is a run in a folder of its own below --runs, made by dflash fit and dflash measure.

  dflash sweep bench/dspark seed=1,2,3
  dflash sweep bench/dflash,bench/dspark optim.lr=1e-3,2e-3 seed=1,2,3 --jobs 2
  dflash sweep dflash conditioning.target_layer_ids=[4],[2,8] measure=bench --runs runs/layers

The same command again skips finished points and goes on with the others, also after a crash. A point that fails is
reported, and the others go on. With --jobs every process gets one thread, unless OMP_NUM_THREADS is set. The exit
status is 1 when a point failed. {SWEEP_FOLDER}/points holds what the processes said."""
    parser = add("sweep", "train and measure every combination of settings and seeds", text)
    parser.add_argument("recipe", metavar="RECIPE[,RECIPE]", help="shipped recipes, YAML files or run folders")
    parser.add_argument("overrides", nargs="*", metavar="key=a,b", help="axes and settings; [1,2] is one value")
    parser.add_argument("--jobs", type=count, default=1, metavar="N", help="points at once; default: 1")
    parser.add_argument("--runs", default=SWEEP_FOLDER, metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="check all points and list them; starts nothing")
    _add_device(parser)


def _add_compare(add: Adder) -> None:
    text = """\
Compare measured runs: tau by domain for every way to decode, differences to a baseline on the same prompts and seeds,
speed, loss, CPU-seconds and parameters, as means and spreads over seeds; and what differs between the recipes, in
words. Intervals are of 95 %, by drawing prompts (within their domains) and seeds anew.

  dflash compare runs/sweep
  dflash compare runs/sweep/bench-* --baseline bench/dflash --markdown
  dflash compare runs/sweep --json bench.json --html bench.html
  dflash compare bench.json --markdown

Runs of one recipe and one set of overrides are one method, whatever their seed. What is missing is marked. Runs of
different targets, data or protocols are refused unless --mixed."""
    parser = add("compare", "compare measured runs", text)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run folders, folders of runs, or files that --json wrote"
    )
    parser.add_argument(
        "--baseline", metavar="NAME", help="the method that others are compared with; default: dflash, else the first"
    )
    parser.add_argument("--mixed", action="store_true", help="compare runs of different targets, data or protocols too")
    parser.add_argument("--markdown", action="store_true", help="print tables in Markdown")
    parser.add_argument("--json", metavar="FILE", help="also write the figures, and all that they come from")
    parser.add_argument("--html", metavar="FILE", help="also write a page with charts, for a browser")


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="D", help="to measure on: cpu, cuda ...; default: cuda where there is one")
