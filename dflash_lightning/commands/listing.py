"""``dflash show`` and ``dflash recipes``: read recipes without loading torch."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_lightning.recipe_load import (
    group_options,
    load_recipe,
    recipe_names,
    recipe_text,
    recipes_folder,
    summary_of,
)


def show(recipe: str, overrides: Sequence[str]) -> int:
    """Print the resolved recipe."""
    print(recipe_text(load_recipe(recipe, overrides)), end="")
    return 0


def list_recipes() -> int:
    """Print every shipped recipe and every option, each with the first line of its file."""
    folder = recipes_folder()
    names = recipe_names()
    print("recipes (dflash fit NAME):")
    _print_rows([(name, summary_of(folder / f"{name}.yaml")) for name in names])
    for group, options in group_options().items():
        print(f"\n{group}=")
        _print_rows([(name, summary_of(folder / group / f"{name}.yaml")) for name in options])
    return 0


def _print_rows(rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, summary in rows:
        print(f"  {name:{width}}  {summary}")
