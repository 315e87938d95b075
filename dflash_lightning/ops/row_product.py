"""A matrix product for few rows on the CPU, compiled on first use.

Decoding reads every weight of the target once per round, and for a handful of rows that reading is all the time it
should take. No product of PyTorch comes near it: with eight rows of float32, ``F.linear`` takes 1.9x the time of one
row and oneDNN with prepacked weights 1.5x, this one 1.0x (SmolLM2-135M, AVX-512, two cores; tests/measure_products.py).
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dflash_lightning.device import abilities
from dflash_lightning.ops.native import compile_library

COLUMNS = 32  # of a panel, as in the source


@cache
def row_product() -> ctypes._NamedFuncPointer | None:
    """The compiled function ``(x, panels, y, rows, N, K)`` of pointers and sizes; null where it cannot be made."""
    library = compile_library("row_product", "verifying takes about 1.5x as long")
    if library is None:
        return None
    function = library.row_product
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 3
    function.restype = None
    return function


def _multiply(x: Tensor, panels: Tensor, out_features: int) -> Tensor:
    function = row_product()
    assert function is not None
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], out_features)
    rows = x.numel() // x.shape[-1]
    function(x.data_ptr(), panels.data_ptr(), y.data_ptr(), rows, out_features, x.shape[-1])
    return y


# For compiled graphs, which cannot call the function by its address; calling the operator costs microseconds more.
_operator = torch.library.custom_op(
    "dflash_lightning::row_product",
    _multiply,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor x, Tensor panels, SymInt out_features) -> Tensor",
)


@_operator.register_fake
def _(x: Tensor, panels: Tensor, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def can_multiply(weight: Tensor) -> bool:
    """Whether ``RowProduct`` takes this weight [O I]: float32 on the CPU, and the kernel could be compiled."""
    return weight.dtype == torch.float32 and abilities(weight.device).own_kernels and row_product() is not None


def _panels(weight: Float[Tensor, "O I"]) -> Float[Tensor, "P I C"]:
    out_features, in_features = weight.shape
    padded = nn.functional.pad(weight.detach(), (0, 0, 0, -out_features % COLUMNS))
    return padded.view(-1, COLUMNS, in_features).transpose(1, 2).contiguous()


class RowProduct(nn.Module):
    """``x @ weight.T + bias``, with ``weight`` [O, I] laid out for the kernel now: changes show after ``refresh``.

    float32 on the CPU, no gradients (see ``can_multiply``). Results differ from ``F.linear`` in the last bits (about
    1e-6 relative). Compiled graphs may hold it: ``refresh`` writes into the same memory.
    """

    def __init__(self, weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None = None) -> None:
        super().__init__()
        assert can_multiply(weight)
        self.out_features, self.in_features = weight.shape
        self.register_buffer("panels", _panels(weight))
        self.panels: Tensor
        self.bias = None if bias is None else bias.detach()

    @torch.no_grad()
    def refresh(self, weight: Float[Tensor, "O I"]) -> None:
        """Lay out the values of ``weight`` anew, in place."""
        self.panels.copy_(_panels(weight))

    def forward(self, x: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        assert x.shape[-1] == self.in_features and x.dtype == torch.float32, (x.shape, x.dtype)
        multiply = _operator if torch.compiler.is_compiling() else _multiply
        y = multiply(x, self.panels, self.out_features)
        return y if self.bias is None else y + self.bias
