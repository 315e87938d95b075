"""Recipes and options as plain values, read from their files: nothing is composed and nothing heavy is imported.

A recipe or option states which published systems it belongs to in a comment at the top of its file::

    # DSpark (arXiv 2607.05147): anchor-first blocks, a Markov head, a confidence signal.
    # systems: 27, 1a
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dflash_lightning.recipe.arguments import source_defaults
from dflash_lightning.recipe.folders import folders_of, group_options, recipe_name, recipe_names, summary_of

_SYSTEMS = re.compile(r"#\s*systems:\s*(.+)", re.IGNORECASE)
_SELF = "_self_"
_OURS = "dflash_lightning."


def catalogue(*folders: Path) -> dict[str, Any]:
    """Everything that can be trained with: ``recipes`` and, by group, ``options``; the first folder goes first.

    A recipe has its ``systems`` and the option that it chooses on every axis (``axes``). An option has the class behind
    it and that class's settings, with the values that the option or else the class gives them; an option of a group of
    named parts (losses, callbacks) has such a pair for each of its ``parts``.
    """
    return {
        "recipes": [
            {**_described(file), "axes": axes_of(file, folders)}
            for folder in folders
            for name in recipe_names(folder)
            for file in [folder / f"{name}.yaml"]
        ],
        "options": {
            group: [_option(_first(folders, group, name), folders) for name in names]
            for group, names in group_options(*folders).items()
        },
    }


def systems_of(file: Path) -> list[str]:
    """The systems named in the comment lines at the top of a recipe or option file."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            return []
        if found := _SYSTEMS.fullmatch(line.strip()):
            return [number.strip() for number in found[1].split(",")]
    return []


def axes_of(file: Path, folders: tuple[Path, ...]) -> dict[str, str | list[str]]:
    """The option that a recipe chooses for each group, those of the recipes that it derives from included."""
    chosen: dict[str, str | list[str]] = {}
    for entry in _tree(file).get("defaults", []):
        if isinstance(entry, dict):
            for group, option in entry.items():
                if option is not None:
                    chosen[str(group).removeprefix("override ").strip().lstrip("/")] = option
        elif entry != _SELF:
            chosen |= axes_of(_named(file, str(entry), (*folders_of(file), *folders)), folders)
    return chosen


def _named(file: Path, name: str, folders: tuple[Path, ...]) -> Path:
    """A recipe or option that ``defaults`` of a file name: in the first of the folders that has it."""
    name = name.lstrip("/")
    places = [folder / f"{name}.yaml" for folder in folders]
    return next((place for place in places if place.is_file() and place != file), file.parent / f"{name}.yaml")


def _first(folders: tuple[Path, ...], group: str, name: str) -> Path:
    return next(place for folder in folders if (place := folder / group / f"{name}.yaml").exists())


def _described(file: Path) -> dict[str, Any]:
    return {"name": recipe_name(file), "file": str(file), "summary": summary_of(file), "systems": systems_of(file)}


def _option(file: Path, folders: tuple[Path, ...]) -> dict[str, Any]:
    tree = _merged(file, folders)
    if "_target_" in tree:
        return {**_described(file), **_part(tree)}
    parts = {name: _part(node) for name, node in tree.items() if isinstance(node, dict)}
    return {**_described(file), "parts": parts}


def _part(node: dict[str, Any]) -> dict[str, Any]:
    path = str(node.get("_target_"))
    own = {key: value for key, value in node.items() if key != "_target_"}
    try:
        defaults = source_defaults(path) if path.startswith(_OURS) else {}
    except ValueError:  # no such class: dflash show says so
        defaults = {}
    return {"class": path, "settings": {**defaults, **own}}


def _merged(file: Path, folders: tuple[Path, ...]) -> dict[str, Any]:
    """An option's values with those of the options of its group that it derives from; nested ones replace."""
    tree = _tree(file)
    merged: dict[str, Any] = {}
    for entry in tree.get("defaults", []):
        if isinstance(entry, str) and entry != _SELF:
            roots = (file.parent, *(folder / file.parent.name for folder in folders))
            merged |= _merged(_named(file, entry, roots), folders)
    return merged | {key: value for key, value in tree.items() if key != "defaults"}


def _tree(file: Path) -> dict[str, Any]:
    """A file as it stands, references unresolved; empty where it is none, which ``dflash show`` reports."""
    try:
        tree = OmegaConf.to_container(OmegaConf.load(file), resolve=False)  # its YAML knows that 6e-4 is a number
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException):
        return {}
    return {str(key): value for key, value in tree.items()} if isinstance(tree, dict) else {}
