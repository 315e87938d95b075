"""The same block attention by ``flex_attention``, for CUDA: the mask is a function, tiles nobody sees are skipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dflash_lightning.ops.context import KVSource

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_compiled_flex_attention = torch.compile(flex_attention)


def flex_block_attention(
    q: Float[Tensor, "B N K Hq D"],
    k_own: Float[Tensor, "B N K Hkv D"],
    v_own: Float[Tensor, "B N K Hkv D"],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    sources: Sequence[KVSource],
    *,
    causal: bool,
    window: int | None,
    scale: float,
) -> Float[Tensor, "B N K Hq D"]:
    """See ``block_attention``; ``keys`` and ``values`` are those of ``sources``, with Hkv heads.

    Columns are the rows of all sources, one source after the other, then the slots of all blocks.
    """
    batch, num_blocks, block_size, num_heads, head_dim = q.shape
    columns_k = torch.cat([*keys, k_own.flatten(1, 2)], dim=1).transpose(1, 2)
    columns_v = torch.cat([*values, v_own.flatten(1, 2)], dim=1).transpose(1, 2)
    rows = q.flatten(1, 2).transpose(1, 2)
    mask_mod = make_mask_mod(sources, [k.shape[1] for k in keys], block_size, causal=causal, window=window)
    mask = create_block_mask(
        mask_mod, batch, None, rows.shape[2], columns_k.shape[2], device=str(q.device), _compile=q.is_cuda
    )
    attend = _compiled_flex_attention if q.is_cuda else flex_attention
    out = attend(rows, columns_k, columns_v, block_mask=mask, scale=scale, enable_gqa=num_heads != columns_k.shape[1])
    return out.transpose(1, 2).reshape(batch, num_blocks, block_size, num_heads, head_dim)


def make_mask_mod(
    sources: Sequence[KVSource], lengths: Sequence[int], block_size: int, *, causal: bool, window: int | None
) -> MaskMod:
    """Whether slot row ``q`` (flat over blocks) of batch row ``b`` sees column ``c``; ``block_attention``'s rule."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, c: Tensor) -> Tensor:
        block, slot = q // block_size, q % block_size
        seen = torch.zeros_like(c, dtype=torch.bool) & (q < 0)
        first = 0
        for source, length in zip(sources, lengths, strict=True):
            row = c - first
            inside = (row >= source.start[b, block]) & (row < source.end[b, block]) & (row < length)
            if window is not None:
                inside = inside & (source.slot_row[b, block] + slot - row < window)
            seen = seen | inside
            first += length
        column = c - first
        distance = slot - column % block_size
        own = (column >= 0) & (column // block_size == block)
        if causal:
            own = own & (distance >= 0)
        if window is not None:
            own = own & (distance.abs() < window)
        return seen | own

    return mask_mod
