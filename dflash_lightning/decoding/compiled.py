"""Compilation of fixed-shape functions, with every graph counted and a plain fallback."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed


class GraphCounter:
    """Compiles functions of static shape with Inductor and counts the graphs made.

    ``count`` must stop growing after warm-up: a later graph means that a shape, a stride or the grad mode differs from
    call to call, and seconds of compilation in the middle of a decoding. Weights stay inputs of the graphs (Inductor's
    freezing would fold in today's weights, and decoding after the next optimizer step would silently use them).
    """

    def __init__(self) -> None:
        self.count = 0

    def _backend(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.count += 1
        return torch._dynamo.lookup_backend("inductor")(graph, inputs)

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` with a graph for each shape it is called with; what would break the graph is an error."""
        assert isinstance(function, FunctionType)
        # Dynamo's cache and its recompile limit belong to the code object, which all closures of one source line share;
        # a copy per decoder keeps them apart.
        own = FunctionType(
            function.__code__.replace(),
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        return torch.compile(own, backend=self._backend, fullgraph=True, dynamic=False)


def warn_uncompiled(error: BackendCompilerFailed) -> None:
    """Say once that decoding goes on without compilation, and why."""
    reason = str(error).strip().splitlines()[0]
    warnings.warn(
        f"The draft step could not be compiled and runs uncompiled, which is slower ({reason}). "
        "Install a C++ compiler (for example g++), or pass decoding.compile=false to silence this.",
        stacklevel=2,
    )
