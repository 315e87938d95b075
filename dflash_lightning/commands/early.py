"""What a command can answer before it imports torch: files that are not there, and a run that is finished."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dflash_lightning.bench.distinct import check_distinct, check_folder
from dflash_lightning.bench.plan import Plan
from dflash_lightning.bench.points import Point, make_points
from dflash_lightning.bench.record import MEASURED_FILE
from dflash_lightning.bench.runs import Run, check_measured, find_runs
from dflash_lightning.commands.output_file import check_output, check_rows_file
from dflash_lightning.files import (
    RECIPE_FILE,
    STATE_FILE,
    check_export_place,
    find_draft_place,
    find_file,
    missing_in_export,
)
from dflash_lightning.recipe.check import early_faults
from dflash_lightning.recipe.decoding import decoding_node
from dflash_lightning.recipe.faults import Fault, RecipeError
from dflash_lightning.recipe.load import load_recipe, load_with_faults
from dflash_lightning.run import RunFolder
from dflash_lightning.target.hub import reachable
from dflash_lightning.target.place import locate

_LOADED_BY = "dflash_lightning.target.load_target"
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
    if args.command == "check" and (lacks := missing_in_export(Path(args.folder))):
        raise ValueError(f"{args.folder}: there is no {lacks}. Give a folder that `dflash export` wrote.")
    for path in [*_listed(getattr(args, "draft", None)), *_listed(getattr(args, "run_dir", None))]:
        find_draft_place(path, setting="--draft")
    if args.command == "export":
        check_export_place(Path(args.out), replace=args.replace, source=Path(args.draft).expanduser())
    if "decoding_defaults" in args:
        decoding_node(args)
    # An export says first what its format cannot hold, which no target changes.
    if getattr(args, "target", None) is not None and args.command != "export":
        _check_target(load_recipe("dflash", [f"target={args.target}"]))


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


def checked_runs(args: argparse.Namespace) -> list[Run]:
    """The runs of a comparison, at least one of them measured.

    Raises:
        ValueError: a word that names no runs, damaged files, no figures, or a place where nothing can be written.
    """
    for option in ("json", "html"):
        check_output(getattr(args, option), f"--{option}", args.runs if option == "html" else [])
    if args.json and args.html and Path(args.json).resolve() == Path(args.html).resolve():
        raise ValueError(f"--html: {args.html} is the file of --json, too. Name two files.")
    runs = find_runs(args.runs)
    read = [str(Path(run.where) / name) for run in runs for name in (MEASURED_FILE, RECIPE_FILE, STATE_FILE)]
    for option in ("json", "html"):
        check_output(getattr(args, option), f"--{option}", read)
    check_measured(runs)
    return runs


def finished_run(name: str) -> RunFolder:
    """The folder of a finished run.

    Raises:
        ValueError: it is none.
    """
    run = RunFolder(Path(name).expanduser())
    if not (run.path / RECIPE_FILE).exists():
        raise ValueError(f"RUN: {name} is no run folder (it has no {RECIPE_FILE}). Give folders that dflash fit wrote.")
    if not run.finished:
        raise ValueError(
            f"RUN: {name} is not finished, and figures of a run that goes on say nothing. Finish it: dflash fit {name}."
        )
    return run


def _check_target(cfg: DictConfig) -> None:
    """Refuse a target that is neither here nor on a hub that answers."""
    source = OmegaConf.select(cfg, "target.source", throw_on_missing=False)
    if isinstance(source, str) and cfg.target.get("_target_") == _LOADED_BY:
        revision = OmegaConf.select(cfg, "target.revision", throw_on_missing=False)
        reachable(locate(source), revision)


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
        _check_target(cfg)
        return False
    print(folder.nothing_to_do, flush=True)
    return True
