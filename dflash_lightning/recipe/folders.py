"""Where recipes and options lie: those shipped, and those beside a recipe of one's own."""

from __future__ import annotations

from importlib.resources import files
from itertools import takewhile
from pathlib import Path

_NESTED = ["@package", "_global_"]  # the comment by which a file in a sub-folder is a recipe of its own


def recipes_folder() -> Path:
    """The folder of the shipped recipes."""
    return Path(str(files("dflash_lightning") / "recipes"))


def recipe_names(folder: Path | None = None) -> list[str]:
    """The recipes in a folder; the shipped ones if none is given. One in a sub-folder is called ``bench/dflash``.

    A file whose name begins with ``_`` is none: it holds what several recipes share, which name it in their defaults.
    """
    root = folder or recipes_folder()
    outer = (path.stem for path in root.glob("*.yaml") if not path.name.startswith("_"))
    inner = (path for path in root.glob("*/*.yaml") if not path.name.startswith("_") and is_nested_recipe(path))
    return [*sorted(outer), *sorted(f"{path.parent.name}/{path.stem}" for path in inner)]


def group_options(*folders: Path) -> dict[str, list[str]]:
    """Options by group: sub-folders of ``folders`` (the shipped recipes, if none is given) are groups.

    Files there that are recipes are none of their options.
    """
    options: dict[str, set[str]] = {}
    for path in (path for folder in folders or (recipes_folder(),) for path in folder.glob("*/*.yaml")):
        if not is_nested_recipe(path):
            options.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(names) for group, names in sorted(options.items())}


def is_nested_recipe(path: Path) -> bool:
    """Whether a file is a whole recipe in a sub-folder of recipes, which the comments at its top say.

    Hydra would take it for an option of a group otherwise: ``# @package _global_`` puts its settings at the top.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return False
    head = takewhile(lambda line: line.startswith("#") or not line.strip(), lines)
    return any(line.removeprefix("#").split() == _NESTED for line in head)


def recipe_name(file: Path) -> str:
    """What a recipe's file is called: ``dflash``, or ``bench/dflash`` in a sub-folder."""
    return f"{file.parent.name}/{file.stem}" if is_nested_recipe(file) else file.stem


def folders_of(file: Path) -> list[Path]:
    """Where the options and recipes that a recipe's file names are looked for, the first one first."""
    own, shipped = file.parent.resolve(), recipes_folder().resolve()
    if not is_nested_recipe(file):
        return list(dict.fromkeys([own, shipped]))
    # The folder above goes first: recipes in a sub-folder may have the names of those that they derive from.
    return list(dict.fromkeys([own.parent, shipped, *([] if own.parent == shipped else [own])]))


def summary_of(path: Path) -> str:
    """The first comment line of a recipe or option file that is for people."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            return ""
        if line.removeprefix("#").split()[:1] != _NESTED[:1]:
            return line.removeprefix("#").strip()
    return ""


def folder_words(file: Path, inside: str = "") -> str:
    """The folders in which a recipe's options are looked for, in words."""
    own, shipped = folders_of(file)[0], recipes_folder().resolve()
    if own == shipped:
        return f"the shipped {inside or 'recipes'}"
    return f"folder {own / inside if inside else own} or among the shipped {inside or 'recipes'}"


def misplaced(file: Path, group: str, option: str) -> str:
    """What to do with an option file of that name that lies where none is looked for; empty where there is none."""
    for name in (f"{group}/{option}.yml", f"{option}.yaml", f"{option}.yml"):
        if (found := file.parent / name).is_file() and found.resolve() != file.resolve():
            return f"Move {name} to {group}/{option}.yaml, where options of this group are looked for"
    return ""
