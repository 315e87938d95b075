"""What the class or function behind a ``_target_`` takes: by importing it, or as far as its source text tells."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from dflash_lightning.recipe.hints import hints_of
from dflash_lightning.recipe.make import locate
from dflash_lightning.recipe.source import read_hint, read_signature


@dataclass(frozen=True)
class Arguments:
    """Names and type hints of the arguments that a recipe can set.

    ``made`` is the class that comes out, ``Any`` where it is not known; ``open_ended`` takes further names too.
    """

    hints: dict[str, Any]
    required: frozenset[str]
    open_ended: bool
    made: Any = Any


# Null: cannot be told. Raises ValueError where the path leads nowhere.
Reader: TypeAlias = Callable[[Any], Arguments | None]


def by_import(path: Any) -> Arguments:
    """The arguments of what ``path`` names, which is imported.

    Raises:
        ValueError: it does not import.
    """
    function = locate(path)
    hints, parameters = hints_of(function), inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return Arguments(
        hints={p.name: hints.get(p.name, Any) for p in named},
        required=frozenset(p.name for p in named if p.default is inspect.Parameter.empty),
        open_ended=any(p.kind is p.VAR_KEYWORD for p in parameters),
        made=function if inspect.isclass(function) else hints.get("return", Any),
    )


def source_defaults(path: str) -> dict[str, Any]:
    """Plain defaults (numbers, texts, lists, null) of the arguments of ``path``, as the source text has them."""
    signature = read_signature(path)
    found: dict[str, Any] = {}
    for name, parameter in ({} if signature is None else signature.parameters).items():
        if parameter.default is not None:
            with suppress(ValueError):
                found[name] = ast.literal_eval(parameter.default)
    return found


def from_source(path: Any) -> Arguments | None:
    """The arguments as the source text has them; null where that leaves a doubt.

    Raises:
        ValueError: a path into this package that leads nowhere, or a package that is not there.
    """
    signature = read_signature(path) if isinstance(path, str) else None
    if signature is None:
        return None
    return Arguments(
        hints={name: read_hint(p.annotation, signature.module) for name, p in signature.parameters.items()},
        required=frozenset(name for name, p in signature.parameters.items() if p.default is None),
        open_ended=signature.open_ended,
    )
