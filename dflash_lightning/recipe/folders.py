"""Where recipes and options lie: those shipped, and those beside a recipe of one's own.

A sub-folder holds the options of one group (``loss/tv.yaml``), or recipes that belong together (``ablation/no_decay``).
Such a recipe begins with the line ``# @package _global_``: its settings are those of a recipe, and not of a group. A
file whose name begins with ``_`` is neither: recipes name it in their ``defaults``.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

_RECIPE = "# @package _global_"  # Hydra's words for "at the top of the tree"; they must be the first line


def recipes_folder() -> Path:
    """The folder of the shipped recipes."""
    return Path(str(files("dflash_lightning") / "recipes"))


def recipe_names(folder: Path | None = None) -> list[str]:
    """The recipes in a folder (the shipped ones if none is given), then those in its sub-folders: ``ablation/depth``."""
    root = folder or recipes_folder()
    inner = [path for path in root.glob("*/*.yaml") if _is_recipe(path)]
    return [*sorted(path.stem for path in root.glob("*.yaml")), *sorted(recipe_name(path, root) for path in inner)]


def recipe_name(file: Path, folder: Path | None = None) -> str:
    """What a recipe is called: its path below ``folder`` (the shipped recipes, if none is given), without the suffix."""
    root = (folder or recipes_folder()).resolve()
    inside = file.resolve().is_relative_to(root)
    return file.resolve().relative_to(root).with_suffix("").as_posix() if inside else file.stem


def group_options(*folders: Path) -> dict[str, list[str]]:
    """Options by group: every sub-folder of ``folders`` (the shipped recipes, if none is given) is a group.

    Sub-folders of recipes are none.
    """
    options: dict[str, set[str]] = {}
    for path in (path for folder in folders or (recipes_folder(),) for path in folder.glob("*/*.yaml")):
        if not path.name.startswith("_") and not _is_recipe(path):
            options.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(names) for group, names in sorted(options.items())}


def options_folder(file: Path) -> Path:
    """The folder in which a recipe's options and the recipes that it derives from are looked for first."""
    shipped = recipes_folder()
    return shipped if file.resolve().is_relative_to(shipped.resolve()) else file.parent


def summary_of(path: Path) -> str:
    """The first comment line of a recipe or option file."""
    lines = path.read_text(encoding="utf-8").splitlines()[:2]
    first = next((line for line in lines if line != _RECIPE), "")
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def _is_recipe(path: Path) -> bool:
    """Whether a file of a sub-folder is a recipe, and no option."""
    if path.name.startswith("_"):
        return False
    with path.open("rb") as stream:
        return stream.readline().strip() == _RECIPE.encode()


def folder_words(file: Path, inside: str = "") -> str:
    """The folders in which a recipe's options are looked for, in words."""
    own, shipped = options_folder(file).resolve(), recipes_folder().resolve()
    if own == shipped:
        return f"the shipped {inside or 'recipes'}"
    return f"folder {own / inside if inside else own} or among the shipped {inside or 'recipes'}"


def misplaced(file: Path, group: str, option: str) -> str:
    """What to do with an option file of that name that lies where none is looked for; empty where there is none."""
    for name in (f"{group}/{option}.yml", f"{option}.yaml", f"{option}.yml"):
        if (found := options_folder(file) / name).is_file() and found.resolve() != file.resolve():
            return f"Move {name} to {group}/{option}.yaml, where options of this group are looked for"
    return ""
