"""Copies of module trees that share every parameter: what is changed on the copy is not seen by the original."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn


def shallow_copy(module: nn.Module) -> Any:
    """The same module with dictionaries of children and hooks of its own; their values are the original's objects."""
    clone = copy.copy(module)
    clone._modules = dict(module._modules)
    clone._forward_hooks = OrderedDict(module._forward_hooks)
    clone._forward_hooks_with_kwargs = OrderedDict(module._forward_hooks_with_kwargs)
    clone._forward_hooks_always_called = OrderedDict(module._forward_hooks_always_called)
    return clone


def copy_tree(module: nn.Module, replace: Callable[[nn.Module], nn.Module | None]) -> Any:
    """A shallow copy of the whole tree in which ``replace`` may put another module in a module's place.

    ``replace`` gets the original and returns its replacement, or null to have it copied. A module that stands in the
    tree twice stays one module.
    """
    return _visit(module, replace, {})


def _visit(original: nn.Module, replace: Callable[[nn.Module], nn.Module | None], done: dict[int, nn.Module]) -> Any:
    """``done`` holds the copies by ``id``. Not a function within another: one that calls itself is freed late."""
    if id(original) not in done:
        replacement = replace(original)
        clone = shallow_copy(original) if replacement is None else replacement
        done[id(original)] = clone
        if replacement is None:
            clone._modules = {
                name: None if child is None else _visit(child, replace, done) for name, child in clone._modules.items()
            }
    return done[id(original)]
