"""Settings of the right type that still cannot run: numbers out of range.

Their own classes say so late (after the weights are loaded, at the first step) or as a traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

from dflash_lightning.recipe_faults import Fault

MAX_SEED = 2**32 - 1  # numpy's generator takes no more


def range_faults(tree: dict[str, Any]) -> Iterator[Fault]:
    """Faults of values alone; values that are open or of another type have theirs already and are passed over."""
    seed = tree.get("seed")
    if _is_number(seed) and not 0 <= seed <= MAX_SEED:
        yield Fault("seed", f"{seed} is not between 0 and {MAX_SEED}", f"Set seed to a whole number up to {MAX_SEED}")
    yield from _below_one(tree, "trainer", "accumulate_grad_batches", "1 steps after every batch")
    yield from _below_one(tree, "data", "row_blocks", "null sets no limit")
    callbacks = tree.get("callbacks")
    callbacks = callbacks if isinstance(callbacks, dict) else {}
    for name, node in callbacks.items():
        if isinstance(node, dict) and str(node.get("_target_")).endswith("SpeculativeEval"):
            yield from _below_one(callbacks, name, "limit", "null uses all prompts", prefix="callbacks.")


def _below_one(tree: dict[str, Any], part: str, key: str, note: str, prefix: str = "") -> Iterator[Fault]:
    node = tree.get(part)
    value = node.get(key) if isinstance(node, dict) else None
    if _is_number(value) and value < 1:
        yield Fault(f"{prefix}{part}.{key}", f"{value} is not 1 or more", f"Set a whole number from 1; {note}")


def _is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
