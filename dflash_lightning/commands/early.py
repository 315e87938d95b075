"""What a command can answer before it imports torch: files that are not there, and a run that is finished."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from dflash_lightning.bench.distinct import check_distinct, check_folder
from dflash_lightning.bench.plan import Plan
from dflash_lightning.bench.points import Point, make_points
from dflash_lightning.commands.output_file import check_output, check_rows_file
from dflash_lightning.files import find_draft_place, find_file
from dflash_lightning.recipe.check import early_faults
from dflash_lightning.recipe.decoding import decoding_node
from dflash_lightning.recipe.faults import Fault, RecipeError
from dflash_lightning.recipe.load import load_recipe, load_with_faults
from dflash_lightning.run import RunFolder
from dflash_lightning.target.place import locate

# By which launchers number the processes of a run; those behind the first leave the talking to it.
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "NODE_RANK", "GROUP_RANK")


def check_files(args: argparse.Namespace) -> None:
    """Refuse files, drafters and targets that are not there, and settings of decoding that are none.

    Raises:
        ValueError: says which argument names what, and what is allowed.
    """
    for path in _listed(getattr(args, "prompts", None)):
        if not Path(path).expanduser().is_dir():  # a saved data set is read where a command takes one
            find_file(path, setting="--prompts" if args.command != "regenerate" else "prompts")
    if getattr(args, "observed", None) is not None:
        find_file(args.observed, setting="--observed")
    if args.command == "report":
        check_output(args.html, "--html", [])
    if args.command == "regenerate":
        check_rows_file(args.out, "--out")
    if args.command == "check" and not Path(args.folder).is_dir():
        raise ValueError(f"{args.folder}: there is no such folder. Give one that dflash export wrote.")
    for path in [*_listed(getattr(args, "draft", None)), *_listed(getattr(args, "run_dir", None))]:
        find_draft_place(path, setting="--draft")
    if "decoding_defaults" in args:
        decoding_node(args)
    # An export says first what its format cannot hold, which no target changes.
    if getattr(args, "target", None) is not None and args.command != "export":
        locate(str(load_recipe("dflash", [f"target={args.target}"]).target.source))


def checked_text(recipe: str, overrides: Sequence[str]) -> DictConfig:
    """The recipe, if its text has no faults: those of loading it and those of ``early_faults``, all at once.

    Raises:
        RecipeError: it has.
    """
    cfg, faults, refused = load_with_faults(recipe, overrides)
    if cfg is not None:
        faults += [fault for fault in early_faults(cfg) if fault.where.partition(".")[0] not in refused]
    if faults or cfg is None:
        raise RecipeError(faults, recipe if cfg is None else f"recipe {cfg.get('name', '')!r}")
    return cfg


def checked_points(args: argparse.Namespace) -> dict[Point, DictConfig]:
    """The points of a sweep with their recipes, if the text of none has faults.

    Raises:
        RecipeError: words that are no axes, the faults of the first point that has some, or points that are alike.
        ValueError: the folder of runs holds something else.
    """
    plan, found = Plan(Path(args.runs)), {}
    for point in make_points(args.recipe, args.overrides):
        recipe, *words = point.command_words(str(plan.run(point)))
        cfg = found[point] = checked_text(recipe, words)
        if cfg.get("measure") is None:
            do = "Add measure=bench, or derive the recipe from one that measures"
            raise RecipeError([Fault("measure", "a sweep measures what it trains, and nothing is named", do)], recipe)
    check_distinct(found)
    check_folder(found, plan)
    return found


def _listed(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def nothing_to_fit(recipe: str, overrides: Sequence[str], *, anew: bool) -> bool:
    """Refuse a recipe whose text has faults; then say that its run is finished, if it is, and there is nothing to do.

    ``anew`` says that a finished run is no reason to stop. Further processes of a run are not asked: they follow the
    first one.

    Raises:
        RecipeError: all faults that need no import (see ``early_faults``).
    """
    if any(os.environ.get(name, "0") != "0" for name in _RANKS):
        return False
    cfg = checked_text(recipe, overrides)
    folder = RunFolder(Path(cfg.run_dir))
    if anew or not folder.finished or not folder.is_same_run(cfg):
        return False
    print(folder.nothing_to_do, flush=True)
    return True
