"""``dflash sweep``: a run for every combination of recipes, settings and seeds, each trained and measured."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from omegaconf import DictConfig

from dflash_lightning.bench.plan import Plan
from dflash_lightning.bench.points import Point
from dflash_lightning.bench.record import MEASURED_FILE, drafter_digest, read_measured
from dflash_lightning.bench.summary import one_line
from dflash_lightning.bench.sweep import INTERRUPTED, Sweep
from dflash_lightning.recipe import check_recipe
from dflash_lightning.run import RunFolder


def sweep(args: argparse.Namespace, recipes: dict[Point, DictConfig]) -> int:
    """Make all points, given with their recipes; 1 where one failed, 130 where the sweep was asked to end.

    Raises:
        RecipeError: a point has faults; all are looked at before the first one begins.
    """
    points, plan = list(recipes), Plan(Path(args.runs))
    _check(recipes, plan)
    work = Sweep(
        plan,
        commands=lambda point, run: _commands(point, run, args.device),
        is_done=lambda point: _is_done(plan.run(point), recipes[point]),
        result=lambda point: one_line(read_measured(plan.run(point) / MEASURED_FILE)),
        jobs=args.jobs,
        threads=1 if args.jobs > 1 else None,
        say=lambda line: print(line, flush=True),
    )
    if args.dry_run:
        for point in points:
            print(f"{'done' if work.is_done(point) else 'to do'}  {plan.run(point)}")
        return 0
    outcomes = work.run(points)
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    stopped = sum(outcome.state == "stopped" for outcome in outcomes)
    done = len(points) - len(failed) - stopped
    print(f"{done} of {len(points)} points are done. Next: dflash compare {plan.folder}")
    for outcome in failed:
        print(
            f"dflash: {outcome.point.name} failed: {outcome.said}\n  all it said: {plan.log(outcome.point)}",
            file=sys.stderr,
        )
    if work.stopped:
        print(f"dflash: interrupted; {stopped} points are left: the same command goes on", file=sys.stderr)
        return INTERRUPTED
    return 1 if failed else 0


def _commands(point: Point, run: Path, device: str | None) -> list[list[str]]:
    program = [sys.executable, "-m", "dflash_lightning"]
    return [
        [*program, "fit", *point.command_words(str(run))],
        [*program, "measure", str(run), *([] if device is None else ["--device", device])],
    ]


def _check(recipes: dict[Point, DictConfig], plan: Plan) -> None:
    """Look for faults once more, with the classes that the recipes name; a seed changes nothing of that.

    Raises:
        RecipeError: the faults of the first point that has some.
    """
    seen = set()
    for point, cfg in recipes.items():
        kind = (point.recipe, *(word for word in point.overrides if not word.startswith("seed=")))
        if kind not in seen and not _is_done(plan.run(point), cfg):
            check_recipe(cfg)
        seen.add(kind)


def _is_done(run: Path, cfg: DictConfig) -> bool:
    """Whether a run of this recipe is trained, and measured with the weights that it has.

    A damaged file is no reason to stop a sweep: the point is made again, and its own command says what is wrong.
    """
    folder = RunFolder(run)
    try:
        if not folder.finished or not folder.is_same_run(cfg) or not (run / MEASURED_FILE).exists():
            return False
        return read_measured(run / MEASURED_FILE)["drafter_sha256"] == drafter_digest(run)
    except ValueError:
        return False
