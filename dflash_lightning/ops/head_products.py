"""The language head's two products in a training step: logits of hidden rows, and gradients back to those rows.

On a CPU a product lays its weight out anew each time, which a chunk of few rows does not repay. With a weight that is
laid out once, the logits of SmolLM2-135M's head take 0.62x the time in float32, in chunks of 136 rows. A copy is as
large as the head, so there are as many as ``PACKED_BYTES`` hold, the one for the logits first: it saves most. A head
that is too large for that has larger chunks instead, which use the same memory in turn.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_lightning.device import abilities
from dflash_lightning.ops.chunks import chunk_bytes
from dflash_lightning.ops.prepacked_linear import can_prepack

FEW_ROWS = 256  # a chunk of more repays that the weight is laid out for it
PACKED_BYTES = 112 * 2**20  # of laid-out copies; it holds one of SmolLM2-135M's head in float32
ROOM_BYTES = 96 * 2**20  # of chunks that use the same memory in turn, which costs no page faults (see ``ops.chunks``)
_ROWS_HINT = 128  # the layout is chosen for about this many rows; it works, and is as exact, for any number


class HeadProducts:
    """Products with a frozen ``weight`` [V H], given in the dtype that they are made in. They carry no gradients."""

    def __init__(self, weight: Float[Tensor, "V H"]) -> None:
        columns, width = weight.shape
        fits = packed_copies(weight.device, columns, width, weight.element_size())
        copies = fits if can_prepack(weight) else 0
        self._forward = _lay_out(weight) if copies >= 1 else None
        self._back = _lay_out(weight.T.contiguous()) if copies >= 2 else None
        self._weight = weight if copies < 2 else None

    @property
    def packed(self) -> bool:
        """Whether logits take memory of their own instead of what they are given."""
        return self._forward is not None

    def logits(self, rows: Float[Tensor, "r H"], room: Float[Tensor, "r V"]) -> Float[Tensor, "r V"]:
        """``rows @ weight.T``, in ``room`` or elsewhere."""
        if self._forward is not None:
            return _multiply(rows, self._forward)
        assert self._weight is not None
        return torch.mm(rows, self._weight.T, out=room)

    def back(self, gradient: Float[Tensor, "r V"], out: Float[Tensor, "r H"]) -> None:
        """``out = gradient @ weight``."""
        if self._back is not None:
            out.copy_(_multiply(gradient, self._back))
        else:
            assert self._weight is not None
            torch.mm(gradient, self._weight, out=out)


def packed_copies(device: torch.device, columns: int, width: int, itemsize: int) -> int:
    """How many laid-out copies of a head [columns, width] of ``itemsize`` bytes are kept: 0, 1 or 2."""
    if not abilities(device).own_kernels or chunk_bytes(device) // (itemsize * columns) >= FEW_ROWS:
        return 0
    return min(2, PACKED_BYTES // (itemsize * columns * width))


def chunk_rows(device: torch.device, columns: int, *, itemsize: int, packed: bool, buffers: int) -> int:
    """Rows of a chunk of ``columns`` logits of ``itemsize`` bytes.

    Without ``packed`` products, ``buffers`` chunks of memory are used by all in turn.
    """
    rows = chunk_bytes(device) // (itemsize * columns)
    if abilities(device).own_kernels and not packed:
        rows = max(rows, min(FEW_ROWS, ROOM_BYTES // buffers // (itemsize * columns)))
    return max(1, rows)


def _lay_out(weight: Float[Tensor, "O I"]) -> Tensor:
    laid_out: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
    return laid_out


def _multiply(rows: Float[Tensor, "r I"], laid_out: Tensor) -> Float[Tensor, "r O"]:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, laid_out, None, "none", [], "")
    return product
