"""The words behind ``dflash smoke``: recipes, and settings that are changed in all of them."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_lightning.recipe.folders import recipe_names
from dflash_lightning.recipe.load import find_recipe

ALL = "all"


def smoke_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Recipes (all shipped ones where none is named) and settings.

    Raises:
        RecipeError: there is no such recipe.
    """
    overrides = [word for word in words if "=" in word or word.startswith("~")]
    return chosen([word for word in words if word not in overrides] or [ALL]), overrides


def chosen(words: Sequence[str]) -> list[str]:
    """The recipes that are meant: ``all`` are the shipped ones, ``FOLDER/all`` those of a sub-folder.

    ``all`` leaves sub-folders out: what lies there are variants, most of which differ from a recipe in a number.

    Raises:
        RecipeError: there is none of a name.
    """
    names = [name for word in words for name in _meant(word)]
    for name in names:
        find_recipe(name)
    return list(dict.fromkeys(names))


def _meant(word: str) -> list[str]:
    folder, _, last = word.rpartition("/")
    inside = [name for name in recipe_names() if name.rpartition("/")[0] == folder] if last == ALL else []
    return inside or [word]
