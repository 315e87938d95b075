"""Faults of single values and of ``_target_`` nodes: the schema is the constructors' own signatures."""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from dflash_lightning.recipe.arguments import Arguments, Reader, by_import
from dflash_lightning.recipe.faults import Fault, fault_of, hint_for
from dflash_lightning.recipe.hints import advice, describe, fits, is_settings_class
from dflash_lightning.recipe.make import make
from dflash_lightning.recipe.tree import UNKNOWN, holds_unknown
from dflash_lightning.recipe.words import DECODING

# What the framework passes itself: a recipe that sets it would be ignored.
_SUPPLIED = {"data": {"target"}, "trainer": {"callbacks"}}
_INSTEAD = {"trainer.callbacks": "; name callbacks in the group callbacks", "data.target": "; choose target=..."}
# Recipe-only keys of a node.
_RESERVED = {"target": {"suggested"}}
# Groups whose constructors take settings only and are cheap: their own checks of ranges count as faults too.
_CHEAP = ("block", "conditioning", "drafter", "head", "loss", "optim", "decoding", "measure")


@dataclass(frozen=True)
class NodeChecker:
    """Checks values against hints; ``read`` says what a ``_target_`` takes.

    Only with ``by_import`` are cheap parts also constructed, so that their own checks of ranges count.
    """

    read: Reader = by_import

    def named(self, nodes: Any, where: str, hint: Any) -> Iterator[Fault]:
        """A mapping of named ``_target_`` nodes: loss terms, callbacks."""
        if not isinstance(nodes, dict):
            do = f"Write {where}: {{name: {{_target_: ...}}}}"
            yield Fault(where, f"{nodes!r} is not a mapping of named parts", do)
            return
        for name, node in nodes.items():
            at = f"{where}.{name}"
            if node is None:
                what = "null stands for no part, and a part that is not wanted is taken out instead"
                yield Fault(at, what, f"Remove {at}")
            elif isinstance(node, dict) and "_target_" not in node:
                what = f"has no _target_, only {sorted(node)}: settings of a part that is not chosen"
                do = f"Choose it ({where}=[...,{name}]), or take it out: {at}: null in a file, ~{at} behind a command"
                yield Fault(at, what, do)
            else:
                yield from self.value(node, hint, at)

    def value(self, value: Any, hint: Any, where: str) -> Iterator[Fault]:
        """A value that an argument with this hint is to get."""
        if value is UNKNOWN:
            return
        if isinstance(value, dict) and "_target_" in value:
            yield from self.node(value, hint, where)
            return
        if is_settings_class(hint):
            do = "Write a mapping with _target_: <class path> and settings"
            yield Fault(where, f"{value!r} is no {hint.__name__}", do)
        elif holds_unknown(value):
            return
        elif isinstance(value, list) and any(isinstance(item, dict) and "_target_" in item for item in value):
            for i, item in enumerate(value):
                yield from self.value(item, Any, f"{where}[{i}]")
        elif isinstance(value, dict) and _classes(hint):
            what = f"settings {sorted(value)} are given, but no class that they belong to"
            group = where.partition(".")[0]
            yield Fault(
                where, what, f"Choose an option of {group} that has one (dflash recipes), or add {where}._target_"
            )
        elif value == "None" or not fits(value, hint):
            kind = type(value).__name__
            yield Fault(where, f"{value!r} ({kind}) does not fit; allowed: {describe(hint)}", advice(value, hint))
        elif (number := _not_finite(value)) is not None:
            yield Fault(where, f"{value!r} holds {number}, which is no quantity", "Write a finite number")

    def node(self, node: dict[str, Any], hint: Any, where: str) -> Iterator[Fault]:
        """A mapping with ``_target_`` that is to become an instance of ``hint``."""
        path = node["_target_"]
        try:
            arguments = self.read(path)
        except ValueError as error:
            do = "Give a class's dotted path"
            if str(error).startswith("No module named") and not str(path).startswith("dflash_lightning."):
                do += "; a package of your own is installed (pip install -e FOLDER) or lies on PYTHONPATH"
            yield Fault(f"{where}._target_", f"{path!r} does not import ({error})", do)
            return
        if arguments is None:
            return
        made = arguments.made
        wanted = _classes(hint)
        if wanted and is_settings_class(made) and not issubclass(made, wanted):
            takes = " or ".join(one.__name__ for one in wanted)
            yield Fault(f"{where}._target_", f"{path!r} makes a {made.__name__}", f"{where} takes a {takes}")
            return
        if inspect.isclass(made) and inspect.isabstract(made):
            lacks = ", ".join(sorted(getattr(made, "__abstractmethods__", ())))
            what = f"{path!r} lacks {lacks}, so none can be made"
            yield Fault(f"{where}._target_", what, "Write what it lacks, or name a class that has it")
            return
        own = list(self._arguments(node, arguments, where))
        yield from own
        if self.read is by_import and _is_cheap(where) and not own and not holds_unknown(node):
            for fault in faults_of(lambda: make(node), where):
                yield replace(fault, where=_in_its_part(fault.where, where))

    def _arguments(self, node: dict[str, Any], arguments: Arguments, where: str) -> Iterator[Fault]:
        supplied = _SUPPLIED.get(where, set())
        allowed = arguments.hints.keys() - supplied
        for key, value in node.items():
            at = f"{where}.{key}"
            if key == "_target_" or key in _RESERVED.get(where, set()):
                continue
            if key in supplied:
                yield Fault(at, "would be ignored: the framework sets it", f"Remove it{_INSTEAD.get(at, '')}")
            elif key in arguments.hints:
                yield from self.value(value, arguments.hints[key], at)
            elif not arguments.open_ended:
                yield Fault(at, f"unknown key of {node['_target_']}", hint_for(str(key), allowed))
        for key in sorted(allowed & arguments.required - node.keys()):
            words = describe(arguments.hints[key])
            yield Fault(f"{where}.{key}", f"required by {node['_target_']}", f"Set {where}.{key} ({words})")


def _is_cheap(where: str) -> bool:
    """Whether a node is made to see what its class says: of a cheap group, servers, or what a callback decodes with."""
    group, _, rest = where.partition(".")
    return group in _CHEAP or where == "data.features" or (group == "callbacks" and rest.endswith(f".{DECODING}"))


def _in_its_part(said: str, where: str) -> str:
    """A setting as a recipe writes it: one of several parts of a group does not know its own name there."""
    groups = (where.partition(".")[0], where.rpartition(".")[2])
    own = next((said.removeprefix(f"{group}.") for group in groups if said.startswith(f"{group}.")), None)
    return said if said.startswith(where) or own is None else f"{where}.{own}"


def _classes(hint: Any) -> tuple[type, ...]:
    """The classes of which an argument with this hint takes an instance; none where it takes plain values only."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return tuple(one for one in (typing.get_args(hint) if union else (hint,)) if is_settings_class(one))


def _not_finite(value: Any) -> float | None:
    """A number in ``value`` that is infinite or NaN: YAML has them (.inf), and 1e400 is one."""
    if isinstance(value, float):
        return None if math.isfinite(value) else value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((found for item in items if (found := _not_finite(item)) is not None), None)


def faults_of(look: Callable[[], Any], where: str) -> Iterator[Fault]:
    """What ``look`` says against a setting, as a fault."""
    try:
        look()
    except ValueError as error:
        yield fault_of(error, where)


def class_of(read: Reader, path: str) -> Any:
    """The class that a group's parts are of; ``Any`` where nothing is imported."""
    if read is not by_import:
        return Any
    made = by_import(path).made
    assert inspect.isclass(made)
    return made
