"""``dflash bench``: what a shape costs on this machine."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dflash_lightning.commands.drafts import check_device
from dflash_lightning.commands.grammar_speed import new_tokens
from dflash_lightning.commands.output_file import check_output
from dflash_lightning.errors import SettingError
from dflash_lightning.files import write_atomic
from dflash_lightning.profiling.build import Place
from dflash_lightning.profiling.decode import measure_decode
from dflash_lightning.profiling.figures import VERSION, over_table, table
from dflash_lightning.profiling.regenerate import measure_regenerate
from dflash_lightning.profiling.shape import SIZES, Shape, option, shapes_over
from dflash_lightning.profiling.step import measure_step
from dflash_lightning.profiling.target import measure_target
from dflash_lightning.run import json_text

_DECODES = ("decode", "regenerate")


def bench(args: argparse.Namespace) -> int:
    """Measure, print a table, and write JSON where asked to.

    Raises:
        ValueError: sizes that do not go together, an option that ``KIND`` does not read, no such device, or a file that
            cannot be written; before anything is built.
    """
    shape = Shape(**{name: getattr(args, name) for name in SIZES})
    name, shapes = shapes_over(shape, args.over) if args.over is not None else ("", [shape])
    _check_options(args)
    check_device(args.device)
    check_output(args.json, "--json", [])
    if args.over is None:
        found = measured(args, shape)
        print(table(found))
    else:
        records = [run_alone(args, one) for one in shapes]
        print(over_table(name, records))
        found = {"version": VERSION, "what": args.kind, "over": name, "records": records}
    if args.json is not None:
        write_atomic(Path(args.json), json_text(found))
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Refuse what would be ignored."""
    if args.new_tokens is not None and args.kind not in _DECODES:
        raise SettingError("--new-tokens", f"{args.kind} decodes nothing", do=f"Leave it out, or use {_DECODES}")
    if args.compiled and args.kind != "decode":
        raise SettingError("--compiled", f"{args.kind} drafts nothing", do="Leave it out, or use decode")


def measured(args: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """The record of one shape, measured in this process."""
    place = Place(args.device, getattr(torch, args.dtype))
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        if args.kind == "step":
            return measure_step(shape, place, repeats=args.repeats).record()
        if args.kind == "target":
            return measure_target(shape, place, repeats=args.repeats).record()
        if args.kind == "regenerate":
            return measure_regenerate(shape, place, repeats=args.repeats, new_tokens=new_tokens(args)).record()
        return measure_decode(
            shape, place, repeats=args.repeats, new_tokens=new_tokens(args), compiled=args.compiled
        ).record()
    finally:
        torch.set_num_threads(threads)


def run_alone(args: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """The record of one shape, measured in a process of its own.

    Raises:
        ValueError: it failed; with what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "record.json"
        words = ["bench", args.kind, *_words(args, shape), "--json", str(file)]
        run = subprocess.run([sys.executable, "-m", "dflash_lightning", *words], capture_output=True, text=True)
        if run.returncode:
            raise ValueError(f"dflash {' '.join(words)} failed:\n{run.stderr.strip()[-2000:]}")
        found: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return dict(found)


def _words(args: argparse.Namespace, shape: Shape) -> list[str]:
    """The options of one shape."""
    sizes = {option(name): getattr(shape, name) for name in SIZES if getattr(shape, name)}
    others = {f"--{name}": getattr(args, name) for name in ("repeats", "threads", "device", "dtype")}
    words = [str(word) for pair in (sizes | others).items() for word in pair]
    if args.new_tokens is not None:
        words += ["--new-tokens", str(args.new_tokens)]
    return words + ["--compiled"] * args.compiled
