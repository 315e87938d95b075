"""Which callbacks of a recipe decode during training."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from dflash_lightning.recipe.make import locate
from dflash_lightning.recipe.source import OWN, find_definition

_EVALUATION = f"{OWN}.callbacks.SpeculativeEval"
_KNOWN = (f"{OWN}.", "lightning.")  # no other class of these decodes


def has_evaluation(callbacks: Iterable[Any]) -> bool:
    """Whether one of several callback nodes makes a ``SpeculativeEval``, or an instance of a class derived from it."""
    paths = [str(node.get("_target_")) for node in callbacks if isinstance(node, dict)]
    return any(_is_the_class(path) for path in paths) or any(_is_derived(path) for path in paths)


def _is_the_class(path: str) -> bool:
    """By the source text, since importing the class would cost a recipe's first look seconds."""
    try:
        named, known = find_definition(path), find_definition(_EVALUATION)
    except ValueError:
        return False
    return named is not None and known is not None and named.path == known.path


def _is_derived(path: str) -> bool:
    """By import, for a class of somebody else's package."""
    if path.startswith(_KNOWN):
        return False
    try:
        made, known = locate(path), locate(_EVALUATION)
    except ValueError:
        return False
    return inspect.isclass(made) and issubclass(made, known)
