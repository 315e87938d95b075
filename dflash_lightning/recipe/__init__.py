"""Recipes: YAML files to settings, settings checked, settings to objects.

Names load on first use (``lazy.py``): a recipe is read without torch.
"""

from typing import TYPE_CHECKING

from dflash_lightning.lazy import lazy_names

if TYPE_CHECKING:
    from dflash_lightning.recipe.build import Parts, build_recipe, check_recipe, list_faults
    from dflash_lightning.recipe.check import Suggested, early_faults
    from dflash_lightning.recipe.faults import Fault, RecipeError
    from dflash_lightning.recipe.files import data_files
    from dflash_lightning.recipe.load import load_recipe, recipe_text
    from dflash_lightning.recipe.make import make_target

_HOME = {
    "Fault": "dflash_lightning.recipe.faults",
    "Parts": "dflash_lightning.recipe.build",
    "RecipeError": "dflash_lightning.recipe.faults",
    "Suggested": "dflash_lightning.recipe.check",
    "build_recipe": "dflash_lightning.recipe.build",
    "check_recipe": "dflash_lightning.recipe.build",
    "data_files": "dflash_lightning.recipe.files",
    "early_faults": "dflash_lightning.recipe.check",
    "list_faults": "dflash_lightning.recipe.build",
    "load_recipe": "dflash_lightning.recipe.load",
    "make_target": "dflash_lightning.recipe.make",
    "recipe_text": "dflash_lightning.recipe.load",
}

__all__ = [
    "Fault",
    "Parts",
    "RecipeError",
    "Suggested",
    "build_recipe",
    "check_recipe",
    "data_files",
    "early_faults",
    "list_faults",
    "load_recipe",
    "make_target",
    "recipe_text",
]

__getattr__ = lazy_names(__name__, _HOME)
