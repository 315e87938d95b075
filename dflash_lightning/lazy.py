"""Names of a package that load the module they live in on first use, so that a light command need not pay for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """A module-level ``__getattr__`` for ``package``: ``homes`` says in which module each name lives."""

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return load


class LazyModule:
    """A module that is imported when one of its names is first asked for: for code that few machines run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)
