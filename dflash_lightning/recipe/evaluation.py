"""Which callbacks of a recipe measure decoding during training, and which need something else of the recipe."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from dflash_lightning.recipe.faults import Fault
from dflash_lightning.recipe.make import locate
from dflash_lightning.recipe.source import OWN, find_definition
from dflash_lightning.recipe.tree import mapping_at

_EVALUATION = f"{OWN}.callbacks.SpeculativeEval"
_EXPECTED = f"{OWN}.callbacks.ExpectedTau"
_ROLLOUT, _GROWTH = f"{OWN}.callbacks.Rollout", f"{OWN}.callbacks.BlockGrowth"
_RECORDED, _ON_POLICY = f"{OWN}.block.Recorded", f"{OWN}.loss.OnPolicyLoss"
EXPECTED_PREFIX = "decode/expected_"  # of its figures, unless it is given another
_KNOWN = (f"{OWN}.", "lightning.")  # no other class of these decodes


def has_evaluation(callbacks: Iterable[Any]) -> bool:
    """Whether one of several callback nodes makes a ``SpeculativeEval``, or an instance of a class derived from it."""
    return any(_makes(node, _EVALUATION) for node in callbacks)


def is_expected(node: Any) -> bool:
    """Whether a callback node makes an ``ExpectedTau``."""
    return _makes(node, _EXPECTED)


def decoding_callbacks(callbacks: dict[str, Any]) -> list[str]:
    """The names of those that run the whole target while it trains."""
    return [
        name for name, node in callbacks.items() if any(_makes(node, c) for c in (_EVALUATION, _EXPECTED, _ROLLOUT))
    ]


def is_measured(monitor: str, callbacks: Iterable[Any]) -> bool:
    """Whether one of several callback nodes measures the figure ``monitor``, whose name begins with ``decode/``."""
    nodes = list(callbacks)
    prefixes = [str(node.get("prefix", EXPECTED_PREFIX)) for node in nodes if _makes(node, _EXPECTED)]
    if any(monitor.startswith(prefix) for prefix in prefixes):
        return True
    return not monitor.startswith(EXPECTED_PREFIX) and has_evaluation(nodes)


def company_faults(tree: dict[str, Any]) -> Iterator[Fault]:
    """Callbacks and blocks of which one is of no use without the other.

    They would say so themselves once the target is loaded, or when all has been trained that they had no part in.
    """
    callbacks, recorded = mapping_at(tree, "callbacks"), _makes(tree.get("block"), _RECORDED)
    for name, node in callbacks.items():
        where = f"callbacks.{name}"
        if _makes(node, _ROLLOUT) and not recorded:
            yield Fault(where, "these blocks read no rounds", "Use block=recorded, or leave the callback out")
        if _makes(node, _GROWTH) and not has_evaluation(callbacks.values()):
            what = "nothing is decoded while it trains, so nothing is known of the rounds"
            yield Fault(where, what, f"Add callbacks=[speculative_eval,{name},..]")
    if recorded and not any(_makes(node, _ROLLOUT) for node in callbacks.values()):
        for name, node in mapping_at(tree, "loss").items():
            if _makes(node, _ON_POLICY):
                what = "reads rounds of real decoding, but no callback records any, so that it would train nothing"
                yield Fault(f"loss.{name}", what, "Add callbacks=[speculative_eval,rollout,..], or use another loss")


def _makes(node: Any, wanted: str) -> bool:
    path = str(node.get("_target_")) if isinstance(node, dict) else ""
    return bool(path) and (_is_the_class(path, wanted) or _is_derived(path, wanted))


def _is_the_class(path: str, wanted: str) -> bool:
    """By the source text, since importing the class would cost a recipe's first look seconds."""
    try:
        named, known = find_definition(path), find_definition(wanted)
    except ValueError:
        return False
    return named is not None and known is not None and named.path == known.path


def _is_derived(path: str, wanted: str) -> bool:
    """By import, for a class of somebody else's package."""
    if path.startswith(_KNOWN):
        return False
    try:
        made, known = locate(path), locate(wanted)
    except ValueError:
        return False
    return inspect.isclass(made) and issubclass(made, known)
