"""What ``dflash inspect`` is asked for: settings of a recipe or of a data file, checked before torch is imported."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dflash_lightning.files import RECIPE_FILE, find_file
from dflash_lightning.recipe.arguments import source_defaults
from dflash_lightning.recipe.check import early_faults
from dflash_lightning.recipe.faults import RecipeError
from dflash_lightning.recipe.folders import recipe_names
from dflash_lightning.recipe.load import load_with_faults, recipe_hint

READ_BY = "dflash_lightning.data.DraftData"


def is_recipe(data: str) -> bool:
    """A run folder, a YAML file, or the name of a shipped recipe where there is no such file."""
    path = Path(data).expanduser()
    if path.exists():
        return path.suffix in (".yaml", ".yml") or (path / RECIPE_FILE).exists()
    return data in recipe_names()


def read_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The recipe's data, block and target; for a data file those of the dflash recipe.

    Raises:
        RecipeError: these parts have faults; what else is open in a recipe does not matter here.
    """
    recipe = is_recipe(args.data)
    if not recipe and args.data.isidentifier() and not Path(args.data).exists():  # the form of a recipe's name
        do = f"Give a data file, or a recipe. {recipe_hint(args.data)}"
        raise ValueError(f"{args.data}: there is no such file, and no recipe of that name is shipped. {do}.")
    if not recipe and args.target is None:
        raise ValueError(f"--target: {args.data} is a data file, which belongs to no target. Give --target.")
    target = [] if args.target is None else [f"target={args.target}"]
    cfg, faults, refused = load_with_faults(args.data if recipe else "dflash", [*target, *args.overrides])
    if cfg is None:
        raise RecipeError(faults, args.data)
    if not recipe:
        cfg.data.train = args.data
    _apply_options(cfg, args)
    needed = ("data", "block", "target", "seed")
    faults += [
        fault
        for fault in early_faults(cfg)
        if (group := fault.where.partition(".")[0]) in needed and group not in refused
    ]
    if faults:
        raise RecipeError(faults, args.data)
    if cfg.data._target_ != READ_BY:
        raise ValueError(
            f"data._target_: {cfg.data._target_} reads its rows in a way of its own, which is not known here. "
            f"Inspect data of {READ_BY}."
        )
    tree = {key: OmegaConf.to_container(cfg[key], resolve=True) for key in ("data", "block", "target")}
    given = {key: value for key, value in tree["data"].items() if key != "_target_"}  # type: ignore[union-attr]
    tree["data"] = source_defaults(READ_BY) | given  # type: ignore[operator]
    tree["callbacks"] = _resolvable(cfg.get("callbacks"))
    for name in evaluation_files(args, tree):
        find_file(name, setting="--eval" if name in args.eval else "prompts")
    if args.against is not None:
        find_file(args.against, setting="--against")
    return tree


def _apply_options(cfg: DictConfig, args: argparse.Namespace) -> None:
    given = {
        "data.max_length": args.max_length,
        "data.supervise": args.supervise,
        "data.chat_template_kwargs": args.chat_template_kwargs,
        "data.limit": args.limit,
        "block.block_size": args.block_size,
    }
    for key, value in given.items():
        if value is not None:
            OmegaConf.update(cfg, key, value, merge=False)


def sets_length(args: argparse.Namespace) -> bool:
    """Whether the command line says how many tokens a row may have."""
    return args.max_length is not None or any(text.startswith("data.max_length=") for text in args.overrides)


def _resolvable(callbacks: Any) -> dict[str, str]:
    """Prompt files of the callbacks, by callback; those that the recipe leaves open are left out."""
    found = {}
    for name, node in (callbacks or {}).items():
        if isinstance(node, DictConfig) and "prompts" in node and not OmegaConf.is_missing(node, "prompts"):
            found[str(name)] = str(node.prompts)
    return found


def evaluation_files(args: argparse.Namespace, tree: dict[str, Any]) -> list[str]:
    """The files of prompts that the recipe's callbacks and ``--eval`` name, each once."""
    return list(dict.fromkeys([*tree["callbacks"].values(), *args.eval]))
