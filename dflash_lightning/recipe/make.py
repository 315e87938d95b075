"""From a plain node with ``_target_`` to the object it describes."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from dflash_lightning.recipe.faults import close_match
from dflash_lightning.recipe.hints import conform, hints_of


def locate(path: Any) -> Any:
    """The class or function at a dotted path.

    Raises:
        ValueError: it is no dotted path, a module on the way fails to import, or the last name is not in it.
    """
    module, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    if not module:
        raise ValueError("it is not a dotted path")
    try:
        home = import_module(module)
    except (ImportError, TypeError) as error:  # TypeError: a class that cannot be defined, a head without ``open``
        raise ValueError(str(error)) from error
    try:
        return getattr(home, name)
    except AttributeError:
        near = close_match(name, [n for n in {*vars(home), *getattr(home, "__all__", ())} if not n.startswith("_")])
        raise ValueError(f"{module} has no {name!r}" + (f", but {near!r}" if near else "")) from None


def make(node: Any, **supplied: Any) -> Any:
    """The object a plain node describes: every mapping with ``_target_`` becomes a call, innermost first."""
    if isinstance(node, list):
        return [make(item) for item in node]
    if not isinstance(node, dict):
        return node
    made = {key: make(value) for key, value in node.items() if key != "_target_"}
    if "_target_" not in node:
        return made
    function = locate(node["_target_"])
    hints = hints_of(function)
    return function(**{key: conform(value, hints.get(key, Any)) for key, value in made.items()}, **supplied)


def make_target(node: dict[str, Any], *, layers: bool = True) -> Any:
    """The frozen target that a recipe's ``target`` node describes; what it suggests to recipes is not its business.

    ``target.layers`` is about the training run alone, so that ``layers`` decides: only decoding can go without none.
    """
    settings = {key: value for key, value in node.items() if key not in ("suggested", "layers")}
    return make(settings if layers else {**settings, "layers": False})
