"""Compilation of fixed-shape functions, with every graph counted and a plain fallback."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import GPUTooOldForTriton, TritonMissing

# Dynamo wraps what a backend raises in the first of these, except for the other two, which it hands on as they are.
CANNOT_COMPILE = (BackendCompilerFailed, TritonMissing, GPUTooOldForTriton)


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


def warn_uncompiled(error: Exception) -> None:
    """Say once that decoding goes on without compilation, why, and what would help."""
    cause = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
    reason = f"{type(cause).__name__}: {cause}".strip().splitlines()[0]
    help_by_kind = {
        TritonMissing: "Install Triton (it comes with PyTorch's CUDA packages)",
        GPUTooOldForTriton: "Use a GPU of compute capability 7.0 or newer",
    }
    advice = help_by_kind.get(type(error), "Install a C++ compiler (for example g++)")
    warnings.warn(
        f"The draft step could not be compiled and runs uncompiled, which is slower ({reason}). "
        f"{advice}, or pass decoding.compile=false to silence this.",
        stacklevel=2,
    )
