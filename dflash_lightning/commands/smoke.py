"""``dflash smoke``: does a recipe train, decode without loss, save, load, resume and export? At toy size."""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import textwrap
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng

from dflash_lightning.commands.smoke_stages import Trial
from dflash_lightning.commands.smoke_toy import ToyWorld
from dflash_lightning.commands.smoke_words import smoke_words


def smoke(args: argparse.Namespace) -> int:
    """Try every recipe that is named and print a line for each; the exit status is 1 if one fails.

    Raises:
        ValueError: there is no such recipe.
    """
    recipes, overrides = smoke_words(args.recipes)
    begin, found = time.perf_counter(), []
    with tempfile.TemporaryDirectory(prefix="dflash-smoke-") as folder, isolate_rng():
        world = _made(Path(folder))
        for number, recipe in enumerate(recipes):
            found.append(try_recipe(recipe, overrides, world, Path(folder) / str(number), debug=args.debug))
            if not args.json:
                print(_line(found[-1], max(map(len, recipes))), flush=True)
    failed = [entry["recipe"] for entry in found if not entry["passed"]]
    seconds = time.perf_counter() - begin
    if args.json:
        print(json.dumps({"passed": not failed, "seconds": round(seconds, 1), "recipes": found}, indent=2))
    else:
        said = f"{len(failed)} of {len(found)} failed: {', '.join(failed)}" if failed else "all passed"
        print(f"{len(found)} {'recipe' if len(found) == 1 else 'recipes'} in {seconds:.0f} s, {said}")
    return 1 if failed else 0


def _made(folder: Path) -> ToyWorld:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return ToyWorld.make(folder)


def try_recipe(
    recipe: str, overrides: list[str], world: ToyWorld, folder: Path, *, debug: bool = False
) -> dict[str, Any]:
    """What became of one recipe, in plain values; what it prints on the way is kept off the screen.

    ``folder`` does not exist yet: everything that is written goes there.
    """
    folder.mkdir()
    trial, begin, error = Trial(recipe, overrides, world, folder), time.perf_counter(), ""
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), torch.random.fork_rng(devices=[]):
            trial.run()
    except Exception as caught:  # whatever a part of the recipe may raise: that is what is tried here
        error = f"{type(caught).__name__}: {caught}" if not isinstance(caught, ValueError) else str(caught)
        if debug:
            traceback.print_exc(file=sys.stderr)
    return {
        "recipe": recipe,
        "passed": not error,
        "seconds": round(time.perf_counter() - begin, 2),
        "tau": trial.tau,
        "sampled_tau": trial.sampled_tau,
        "refused": trial.refused,
        "stages": {stage: round(spent, 2) for stage, spent in trial.seconds.items() if spent >= 0},
        "failed_stage": trial.stage if error else None,
        "error": error or None,
    }


def _line(entry: dict[str, Any], width: int) -> str:
    head = f"{'ok' if entry['passed'] else 'FAIL':4}  {entry['recipe']:{width}}  {entry['seconds']:5.1f} s"
    if not entry["passed"]:
        return f"{head}  in {entry['failed_stage']}: {entry['error']}"
    refused = "; ".join(f"{name} ({_short(why)})" for name, why in entry["refused"].items())
    return f"{head}  tau {entry['tau']:.2f}, sampled {entry['sampled_tau']:.2f}" + (
        f"  refused: {refused}" if refused else ""
    )


def _short(reason: str) -> str:
    """Its first words, as many as go into a line; ``--json`` has all of them."""
    return textwrap.shorten(reason, 80, placeholder=" ...")
