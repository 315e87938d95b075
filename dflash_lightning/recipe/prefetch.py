"""Recipes that ask for the next batch's features to be computed during a step, where they cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dflash_lightning.recipe.faults import Fault
from dflash_lightning.recipe.tree import mapping_at

_WHERE, _INSTEAD = "data.prefetch_features", "Set it to auto or false"


def prefetch_faults(tree: dict[str, Any]) -> Iterator[Fault]:
    """What a recipe's text tells; ``LookAhead.pays`` says the same once the device is known."""
    if not asked_for(tree):
        return
    if mapping_at(tree, "trainer").get("accelerator") == "cpu":
        yield Fault(_WHERE, "true, but a CPU has no second queue in which they could be computed", _INSTEAD)
    if mapping_at(tree, "target").get("tensor_parallel") is True:
        what = "true, but the target is cut over ranks (target.tensor_parallel), which compute its features together"
        yield Fault(_WHERE, what, _INSTEAD)


def asked_for(tree: dict[str, Any]) -> bool:
    """Whether the recipe insists on it."""
    return mapping_at(tree, "data").get("prefetch_features") is True


def prefetch_part_faults(tree: dict[str, Any], *, carries: bool) -> Iterator[Fault]:
    """``carries`` says that the conditioning plays rounds, in which the module reads the texts itself."""
    data = mapping_at(tree, "data")
    if asked_for(tree) and carries and data.get("cache_features") is None and not data.get("features"):
        what = "true, but the conditioning plays a round before each step, in which the target reads the text"
        yield Fault(_WHERE, what, _INSTEAD)
