"""Where recipes and options lie: those shipped, and those beside a recipe of one's own."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def recipes_folder() -> Path:
    """The folder of the shipped recipes."""
    return Path(str(files("dflash_lightning") / "recipes"))


def recipe_names(folder: Path | None = None) -> list[str]:
    """The recipes in a folder; the shipped ones if none is given."""
    return sorted(path.stem for path in (folder or recipes_folder()).glob("*.yaml"))


def group_options(*folders: Path) -> dict[str, list[str]]:
    """Options by group: every sub-folder of ``folders`` (the shipped recipes, if none is given) is a group."""
    options: dict[str, set[str]] = {}
    for path in (path for folder in folders or (recipes_folder(),) for path in folder.glob("*/*.yaml")):
        options.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(names) for group, names in sorted(options.items())}


def summary_of(path: Path) -> str:
    """The first comment line of a recipe or option file."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def folder_words(file: Path, inside: str = "") -> str:
    """The folders in which a recipe's options are looked for, in words."""
    own, shipped = file.parent.resolve(), recipes_folder().resolve()
    if own == shipped:
        return f"the shipped {inside or 'recipes'}"
    return f"folder {own / inside if inside else own} or among the shipped {inside or 'recipes'}"


def misplaced(file: Path, group: str, option: str) -> str:
    """What to do with an option file of that name that lies where none is looked for; empty where there is none."""
    for name in (f"{group}/{option}.yml", f"{option}.yaml", f"{option}.yml"):
        if (found := file.parent / name).is_file() and found.resolve() != file.resolve():
            return f"Move {name} to {group}/{option}.yaml, where options of this group are looked for"
    return ""
