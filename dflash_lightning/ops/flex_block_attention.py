"""The same block attention by ``flex_attention``, for CUDA: the mask is a function, tiles nobody sees are skipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dflash_lightning.device import abilities
from dflash_lightning.ops.context import KVSource, made_once

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Span = tuple[Int[Tensor, "B Q"], Int[Tensor, "B Q"]]  # per slot: first column seen, first one not seen any more

# Compiled once per process. A second shape makes them general in it: two compilations, whatever shapes follow.
_compiled_flex_attention = torch.compile(flex_attention)
_compiled_create_block_mask = torch.compile(create_block_mask)


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
    """See ``block_attention``; ``keys`` and ``values`` [B S Hkv D] are those of ``sources``.

    Columns are the rows of all sources, one source after the other, then the slots of all blocks.
    """
    batch, num_blocks, block_size, num_heads, head_dim = q.shape
    columns_k = torch.cat([*keys, k_own.flatten(1, 2)], dim=1).transpose(1, 2)
    columns_v = torch.cat([*values, v_own.flatten(1, 2)], dim=1).transpose(1, 2)
    rows = q.flatten(1, 2).transpose(1, 2)
    key = ("mask", causal, window, *q.shape[:3])
    mask = made_once(sources, key, lambda: make_mask(sources, q, causal=causal, window=window))
    attend = _compiled_flex_attention if abilities(q.device).flex else flex_attention
    with torch.autocast(q.device.type, enabled=False):
        out = attend(
            rows, columns_k, columns_v, block_mask=mask, scale=scale, enable_gqa=num_heads != columns_k.shape[1]
        )
    return out.transpose(1, 2).reshape(batch, num_blocks, block_size, num_heads, head_dim)


def make_mask(sources: Sequence[KVSource], q: Tensor, *, causal: bool, window: int | None) -> BlockMask:
    """Which tiles of [N*K slots, columns] anybody sees; on CUDA without a tensor of that size."""
    batch, num_blocks, block_size = q.shape[:3]
    spans = visible_spans(sources, q, causal=causal, window=window)
    num_slots = num_blocks * block_size
    num_columns = num_slots + sum(source.k.shape[1] for source in sources)
    create: Callable[..., Any] = _compiled_create_block_mask if abilities(q.device).flex else create_block_mask
    return create(make_mask_mod(spans), batch, None, num_slots, num_columns, device=str(q.device))


def make_mask_mod(spans: Sequence[Span]) -> MaskMod:
    """Whether slot ``q`` (flat over blocks) of batch row ``b`` sees column ``c``.

    All that differs from batch to batch is in tensors: a Python number in here would be compiled in, and every new
    length would be compiled again.
    """

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, c: Tensor) -> Tensor:
        seen = c < 0
        for first, last in spans:
            seen = seen | ((c >= first[b, q]) & (c < last[b, q]))
        return seen

    return mask_mod


def visible_spans(sources: Sequence[KVSource], q: Tensor, *, causal: bool, window: int | None) -> list[Span]:
    """The columns that each slot of ``q`` [B N K ..] sees: a span [B N*K] per source, and one for its own block.

    The rule is that of ``block_attention``.
    """
    batch, num_blocks, block_size = q.shape[:3]
    shape = (batch, num_blocks, block_size)
    slots = torch.arange(block_size, device=q.device)
    spans, offset = [], 0
    for source in sources:
        first, last = source.start[..., None], source.end[..., None]  # end <= S, so no source reaches into the next
        if window is not None:
            first = torch.maximum(first, source.slot_row[..., None] + slots - window + 1)
        spans.append((first + offset, last + offset))
        offset += source.k.shape[1]
    low = torch.zeros_like(slots) if window is None else (slots - window + 1).clamp(min=0)
    high = torch.full_like(slots, block_size) if window is None else (slots + window).clamp(max=block_size)
    if causal:
        high = slots + 1
    blocks = (torch.arange(num_blocks, device=q.device) * block_size + offset)[:, None]
    spans.append((blocks + low, blocks + high))
    return [
        (first.expand(shape).flatten(1).contiguous(), last.expand(shape).flatten(1).contiguous())
        for first, last in spans
    ]
