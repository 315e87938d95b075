"""Settings that had other names: an error says the new one, and what an earlier version saved still loads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dflash_lightning.recipe.faults import Fault
from dflash_lightning.recipe.tree import mapping_at, select

# Dotted keys as ``select`` reads them, and the last part of their new name.
RENAMED = {
    "decoding.packed": "prepacked",
    "callbacks.*.decoding.packed": "prepacked",
}
# Values that are written in another way now; null leaves the setting out.
REVALUED: dict[str, dict[str, str | None]] = {
    "decoding.verifier": {"auto": None, "greedy": None},
    "callbacks.*.decoding.verifier": {"auto": None, "greedy": None},
}
# Options that have another name, by group.
RENAMED_OPTIONS = {"loss": {"total_variation": "tv"}}


def renamed_option(group: str, name: str) -> str | None:
    """Today's name of an option, as an advice; null where it never had another one."""
    new = RENAMED_OPTIONS.get(group, {}).get(name)
    return None if new is None else f"It is called {new} now: write {group}={new}"


def renamed_faults(tree: dict[str, Any]) -> Iterator[Fault]:
    """Settings of ``tree`` that have another name or are written in another way now."""
    for pattern, name in RENAMED.items():
        for where, _ in select(tree, pattern):
            new = ".".join([*where.split(".")[:-1], name])
            yield Fault(where, f"is called {new} now", f"Write {new}")
    for pattern, values in REVALUED.items():
        for where, value in select(tree, pattern):
            if isinstance(value, str) and value in values:
                yield Fault(where, f"{value!r} is what null means now", f"Leave {where} out, or write null")


def with_new_names(tree: dict[str, Any]) -> dict[str, Any]:
    """``tree``, a recipe that a run has saved, under today's names; changed in place."""
    for pattern, name in RENAMED.items():
        for where, value in list(select(tree, pattern)):
            node = _parent(tree, where)
            del node[where.rpartition(".")[2]]
            node[name] = value
    for pattern, values in REVALUED.items():
        for where, value in list(select(tree, pattern)):
            if isinstance(value, str) and value in values:
                key, new = where.rpartition(".")[2], values[value]
                if new is None:
                    del _parent(tree, where)[key]
                else:
                    _parent(tree, where)[key] = new
    return tree


def _parent(tree: dict[str, Any], where: str) -> dict[str, Any]:
    return mapping_at(tree, *where.split(".")[:-1])
