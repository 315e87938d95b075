"""Which callbacks of a recipe measure decoding during training, by doing it or without."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from dflash_lightning.recipe.make import locate
from dflash_lightning.recipe.source import OWN, find_definition

_EVALUATION = f"{OWN}.callbacks.SpeculativeEval"
_EXPECTED = f"{OWN}.callbacks.ExpectedTau"
EXPECTED_PREFIX = "decode/expected_"  # of its figures, unless it is given another
_KNOWN = (f"{OWN}.", "lightning.")  # no other class of these decodes


def has_evaluation(callbacks: Iterable[Any]) -> bool:
    """Whether one of several callback nodes makes a ``SpeculativeEval``, or an instance of a class derived from it."""
    return any(_makes(node, _EVALUATION) for node in callbacks)


def is_measured(monitor: str, callbacks: Iterable[Any]) -> bool:
    """Whether one of several callback nodes measures the figure ``monitor``, whose name begins with ``decode/``."""
    nodes = list(callbacks)
    prefixes = [str(node.get("prefix", EXPECTED_PREFIX)) for node in nodes if _makes(node, _EXPECTED)]
    if any(monitor.startswith(prefix) for prefix in prefixes):
        return True
    return not monitor.startswith(EXPECTED_PREFIX) and has_evaluation(nodes)


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
