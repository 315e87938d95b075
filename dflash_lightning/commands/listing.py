"""``dflash recipes``: recipes and options, those shipped and those beside a recipe of one's own."""

from __future__ import annotations

import json
from pathlib import Path

from dflash_lightning.recipe.catalogue import catalogue
from dflash_lightning.recipe.folders import group_options, recipe_names, recipes_folder, summary_of
from dflash_lightning.recipe.load import find_recipe


def list_recipes(recipe: str | None = None, *, as_json: bool = False) -> int:
    """Print every recipe and every option, each with the first line of its file.

    With a recipe of one's own (a file, or its folder) those in its folder come first. ``as_json`` prints what
    ``recipe.catalogue`` knows of them instead.
    """
    shipped = recipes_folder()
    own = None if recipe is None else _folder_of(recipe)
    folders = [shipped] if own is None or own.resolve() == shipped.resolve() else [own, shipped]
    if as_json:
        print(json.dumps(catalogue(*folders), indent=2))
        return 0
    if len(folders) == 2:
        print(f"in {folders[0]} (dflash fit FILE):")
        _print_rows([(f"{name}.yaml", summary_of(folders[0] / f"{name}.yaml")) for name in recipe_names(folders[0])])
        print()
    print("recipes (dflash fit NAME):")
    _print_rows([(name, summary_of(shipped / f"{name}.yaml")) for name in recipe_names()])
    for group, options in group_options(*folders).items():
        print(f"\n{group}=")
        _print_rows([_option_row(folders, group, name) for name in options])
    return 0


def _folder_of(recipe: str) -> Path:
    path = Path(recipe).expanduser()
    return path if path.is_dir() else find_recipe(recipe).parent


def _option_row(folders: list[Path], group: str, name: str) -> tuple[str, str]:
    """An option and what it is; the first folder that has it decides."""
    file = next(f for folder in folders if (f := folder / group / f"{name}.yaml").exists())
    mark = "yours: " if len(folders) == 2 and file.parent.parent == folders[0] else ""
    return name, f"{mark}{summary_of(file)}"


def _print_rows(rows: list[tuple[str, str]]) -> None:
    width = max((len(name) for name, _ in rows), default=0)
    for name, summary in rows:
        print(f"  {name:{width}}  {summary}".rstrip())
