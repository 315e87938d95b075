"""``dflash show``: what a recipe comes to, and what is wrong with it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dflash_lightning.lazy import LazyModule
from dflash_lightning.recipe.check import early_faults
from dflash_lightning.recipe.explain import named_parts, open_values, settings
from dflash_lightning.recipe.faults import RecipeError
from dflash_lightning.recipe.folders import recipe_names
from dflash_lightning.recipe.load import load_with_faults, recipe_text
from dflash_lightning.recipe.tree import plain_tree

_BUILD = LazyModule("dflash_lightning.recipe.build")  # with torch and Lightning


def show(recipe: str, overrides: Sequence[str], *, everything: bool = False) -> int:
    """Print the resolved recipe; with ``everything`` a line for every setting, with default, range and help.

    Faults go to standard error, and the exit status is 2. Values that the recipe leaves open are shown as ``???`` and
    are no fault here. A shipped recipe as it stands has no others than text tells; of any other one, and with
    overrides, the parts are made after it is printed, so that values which their classes refuse are told too.

    Raises:
        RecipeError: there is no such recipe, or it does not come to a tree.
    """
    cfg, faults, refused = load_with_faults(recipe, overrides)
    if cfg is None:
        raise RecipeError(faults, recipe)
    faults += [fault for fault in early_faults(cfg) if fault.where.partition(".")[0] not in refused]
    tree = plain_tree(cfg, [])
    print(*settings(cfg), sep="\n") if everything else print(recipe_text(cfg), end="")
    sys.stdout.flush()
    still_open = open_values(faults)
    if note := named_parts(tree):
        print(note, file=sys.stderr)
    if still_open:
        print(f"still open, to be set for a run: {', '.join(still_open)}", file=sys.stderr)
    wrong = [fault for fault in faults if fault.where not in still_open]
    if not wrong and (overrides or recipe not in recipe_names()):
        wrong = [fault for fault in _BUILD.list_faults(cfg) if fault.where not in still_open]
    if wrong:
        print(f"dflash: {RecipeError(wrong, f'recipe {cfg.name!r}')}", file=sys.stderr)
    return 2 if wrong else 0
