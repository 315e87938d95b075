"""Passes over rows on the CPU, compiled on first use (``fused.cpp``): PyTorch makes several of each.

Rows are float32 or, under autocast, bfloat16; what is computed in between is float32. They are for training steps,
where such passes are what a step costs beside its matrix products. Everywhere else (other devices and dtypes, compiled
graphs, machines without a C++ compiler) callers use PyTorch's operations, which give the same to rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import product

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.device import abilities
from dflash_lightning.ops.native import compile_library

_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_NAMES = {torch.float32: "float", torch.bfloat16: "bfloat16"}  # in the source
_OF_ONE = {  # passes over rows of one dtype
    "softmax_sums": [*[_POINTER] * 3, _SIZE, _SIZE, _FLOAT, _SIZE],
    "gated": [*[_POINTER] * 3, _SIZE, _SIZE],
    "gated_back": [*[_POINTER] * 6, _SIZE, _SIZE],
    "attend": [*[_POINTER] * 5, _FLOAT, _SIZE],
    "attend_back": [*[_POINTER] * 6, _FLOAT, _SIZE],
}
_OF_TWO = {  # passes that read one dtype and write another
    "softmax_write": [*[_POINTER] * 4, _SIZE, _SIZE, _FLOAT, _SIZE],
    "norm_rows": [*[_POINTER] * 6, _SIZE, _SIZE, _SIZE, _FLOAT, _SIZE],
    "norm_rows_back": [*[_POINTER] * 8, *[_SIZE] * 4],
}


@cache
def _library() -> ctypes.CDLL | None:
    library = compile_library("fused", "training takes about 1.1x as long")
    if library is not None:
        types = _NAMES.values()
        signatures = {f"{name}_{x}": given for name, given in _OF_ONE.items() for x in types}
        signatures |= {f"{name}_{x}_{y}": given for name, given in _OF_TWO.items() for x, y in product(types, types)}
        for name, arguments in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
    return library


def can_fuse(*tensors: Tensor) -> bool:
    """Whether the functions here take ``tensors``, of any shape, as rows: plain ones on the CPU, no compiled graph.

    They are float32 or bfloat16, which may be mixed where a function says so.
    """
    if torch.compiler.is_compiling():
        return False
    return (
        all(
            type(x) in (Tensor, nn.Parameter) and x.dtype in _NAMES and abilities(x.device).own_kernels for x in tensors
        )
        and _library() is not None
    )


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a pass that computes what ``kind`` does may stand for calling ``module``.

    It may not for a subclass or a wrapper, which compute something else, nor where hooks want to be called.
    """
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return type(module) is kind and not hooks and "forward" not in vars(module)


def _run(name: str, rows: Sequence[Tensor], *arguments: Tensor | int | float | ctypes.Array | None) -> None:
    """Call ``name`` for the dtypes of ``rows``, with pointers to the numbers of contiguous tensors and all threads."""
    assert all(x.is_contiguous() for x in arguments if isinstance(x, Tensor))
    library = _library()
    assert library is not None
    values = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
    getattr(library, "_".join([name, *(_NAMES[x.dtype] for x in rows)]))(*values, torch.get_num_threads())


def softmax_sums(logits: Float[Tensor, "r V"], floor: float) -> tuple[Float[Tensor, " r"], Float[Tensor, " r"]]:
    """The largest logit of each row, and the sum of ``exp(max(logit - largest, floor))``, both float32."""
    top, total = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2))
    _run("softmax_sums", [logits], logits, top, total, *logits.shape, floor)
    return top, total


def softmax_write(
    logits: Float[Tensor, "r V"],
    top: Float[Tensor, " r"],
    factor: Float[Tensor, " r"],
    floor: float,
    out: Float[Tensor, "r V"],
) -> None:
    """``out = factor * exp(max(logits - top, floor))``, a factor for each row; ``out`` may be ``logits``.

    ``top`` and ``factor`` are float32; ``out`` and ``logits`` may differ in dtype.
    """
    assert out.shape == logits.shape and len(factor) == len(logits) and top.dtype == factor.dtype == torch.float32
    _run("softmax_write", [logits, out], logits, top, factor.contiguous(), out, *logits.shape, floor)


class FusedNorm(torch.autograd.Function):
    """``weight * x / rms(x)`` over the last dimension, and then, with ``cos`` and ``sin``, rotated as ``rotate`` does.

    ``x`` is [*rows, heads, D] where it is rotated, by [*rows, D]; else [*rows, D]. The result is of ``dtype``; weight,
    ``cos`` and ``sin`` are float32. Besides its inputs one number per row is kept.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, cos: Tensor | None, sin: Tensor | None, eps: float, dtype: torch.dtype
    ) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        width = x.shape[-1]
        assert weight.shape == (width,) and (cos is None or cos.shape == (*x.shape[:-2], width))
        rows, heads = x.numel() // width, 1 if cos is None else x.shape[-2]
        y, scale = torch.empty_like(x, dtype=dtype), x.new_empty(rows, dtype=torch.float32)
        _run("norm_rows", [x, y], x, weight, cos, sin, y, scale, rows, width, heads, eps)
        ctx.save_for_backward(x, weight, cos, sin, scale)
        ctx.size = rows, width, heads
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight, cos, sin, scale = ctx.saved_tensors
        to_x = torch.empty_like(x)
        to_weight = x.new_empty(torch.get_num_threads(), x.shape[-1], dtype=torch.float64)
        _run("norm_rows_back", [x, grad], grad.contiguous(), x, weight, cos, sin, scale, to_x, to_weight, *ctx.size)
        return to_x, to_weight.sum(0).float(), None, None, None, None


class FusedSwiGLU(torch.autograd.Function):
    """``(silu(gate) * up) @ down.T`` of ``gate`` and ``up`` [*rows I] and ``down`` [H I], all of one dtype.

    The product of the two is made again in the backward pass instead of kept.
    """

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        assert gate.shape == up.shape and gate.dtype == up.dtype == down.dtype
        ctx.save_for_backward(gate, up, down)
        inner = torch.empty_like(gate)
        _run("gated", [gate], gate, up, inner, gate.numel())
        return nn.functional.linear(inner, down)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        gate, up, down = ctx.saved_tensors
        to_inner = (grad @ down).contiguous()
        inner, to_up = torch.empty_like(gate), torch.empty_like(gate)
        _run("gated_back", [gate], to_inner, gate, up, inner, to_inner, to_up, gate.numel())
        rows = grad.reshape(-1, grad.shape[-1]), inner.view(-1, inner.shape[-1])
        to_down = rows[0].T @ rows[1] if ctx.needs_input_grad[2] else None
        return to_inner, to_up, to_down


class _Rows(ctypes.Structure):
    _fields_ = [(name, _SIZE) for name in ("heads", "blocks", "groups", "slots", "parts")]


def attend(
    scores: Sequence[Float[Tensor, "h rows _"]],
    ranges: Int[Tensor, "n K parts 2"],
    size: tuple[int, int, int, int],
    scale: float,
) -> Float[Tensor, "h rows"]:
    """Turn scores, times ``scale``, into probabilities, in place; returns the log-sum-exp of every row in float32.

    ``scores`` are the parts of what a row may see, with as many columns as there are keys; ``rows`` are n blocks of
    ``g`` groups of K slots, ``size`` is (h, n, g, K). ``ranges`` (int32) says which columns of each part a slot sees.
    """
    sums = scores[0].new_empty(scores[0].shape[:2], dtype=torch.float32)
    _run("attend", scores[:1], _pointers(scores), _columns(scores), ranges, sums, _shape(size, scores), scale)
    return sums


def attend_back(
    scores: Sequence[Float[Tensor, "h rows _"]],
    slopes: Sequence[Float[Tensor, "h rows _"]],
    ranges: Int[Tensor, "n K parts 2"],
    sums: Float[Tensor, "h rows"],
    size: tuple[int, int, int, int],
    scale: float,
) -> None:
    """Turn ``scores`` into probabilities once more, and ``slopes``, their gradients, into those of the scores.

    Both in place; the rest as in ``attend``, which made ``sums``.
    """
    given = _pointers(scores), _pointers(slopes), _columns(scores), ranges, sums, _shape(size, scores)
    _run("attend_back", scores[:1], *given, scale)


def _pointers(parts: Sequence[Tensor]) -> ctypes.Array:
    assert all(part.is_contiguous() and part.dtype == parts[0].dtype for part in parts)
    return (_POINTER * len(parts))(*(part.data_ptr() for part in parts))


def _columns(parts: Sequence[Tensor]) -> ctypes.Array:
    return (_SIZE * len(parts))(*(part.shape[-1] for part in parts))


def _shape(size: tuple[int, int, int, int], parts: Sequence[Tensor]) -> ctypes.Array:
    return (_Rows * 1)(_Rows(*size, len(parts)))
