"""Attention of draft blocks: every slot reads its context interval and its own block under one softmax.

```
#        context 0 1 2 3 4 | own block, anchor 3      end = 3, slot_row = 3
# slot 0         x x x . . | x x x                    slot_row + i - j < window narrows the left edge, slot by slot
# slot 1         x x x . . | x x x
```
Visibility is decided by row numbers only, never by block numbers: overlapping blocks must not see what their own anchor
could not.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_lightning.device import abilities
from dflash_lightning.lazy import LazyModule
from dflash_lightning.ops.chunked_attention import chunked_attention
from dflash_lightning.ops.context import KVSource
from dflash_lightning.ops.dense_attention import attend, context_visible, own_visible
from dflash_lightning.ops.fused import can_fuse
from dflash_lightning.ops.fused_attention import fused_attention

# CUDA only; it brings the compiler along, which eager decoding on a CPU has no use for.
_FLEX = LazyModule("dflash_lightning.ops.flex_block_attention")


def block_attention(
    q: Float[Tensor, "B N K Hq D"],
    k_own: Float[Tensor, "B N K Hkv D"],
    v_own: Float[Tensor, "B N K Hkv D"],
    sources: list[KVSource],
    *,
    causal: bool,
    window: int | None,
    scale: float,
    dense: bool = False,
) -> Float[Tensor, "B N K Hq D"]:
    """Attention output of every slot over all ``sources`` and its own block; softmax in fp32.

    A slot always sees itself, so every row is finite even without context. ``causal`` hides later slots of the own
    block. ``window`` W hides rows W or more positions away: context ``(slot_row + i) - j < W``, own block
    ``|i - j| < W``. Sources may have Hkv or Hq heads. One block per row, or several with one interval (decoding), is
    plain masked attention over the whole context buffer, without a Python branch on tensor values, so that it compiles
    to one static graph; many blocks go through ``flex_attention`` on CUDA (it has no CPU backward), through
    ``ops.fused_attention`` in float32 or bfloat16 on the CPU, and through ``ops.chunked_attention`` elsewhere.
    ``dense`` takes the first way for any number of blocks: for a few short ones, as the lanes of a draft are.
    """
    num_blocks, block_size = q.shape[1:3]
    heads = max([k_own.shape[3], *(source.k.shape[2] for source in sources)])
    k_own, v_own = _with_heads(k_own, heads), _with_heads(v_own, heads)
    keys = [_with_heads(source.k, heads).to(q.dtype) for source in sources]
    values = [_with_heads(source.v, heads).to(q.dtype) for source in sources]
    shared = bool(sources) and all(source.start.shape[1] == 1 for source in sources)  # one interval for all blocks
    if num_blocks == 1 or dense or shared:
        seen = [
            context_visible(
                torch.arange(source.k.shape[1], device=q.device),
                (source.start, source.end, source.slot_row),
                block_size=block_size,
                window=window,
            )
            for source in sources
        ]
        own = own_visible(block_size, causal=causal, window=window, device=q.device)
        parts = list(zip(keys, values, seen, strict=True))
        with torch.autocast(q.device.type, enabled=False):
            return attend(q, k_own, v_own, own, parts, scale)[0]
    given = q, k_own, v_own, keys, values, [source.over(num_blocks, sources[0].masks) for source in sources]
    if abilities(q.device).flex:
        return _FLEX.flex_block_attention(*given, causal=causal, window=window, scale=scale)
    way = fused_attention if can_fuse(q, k_own, v_own, *keys, *values) else chunked_attention
    return way(*given, causal=causal, window=window, scale=scale)


def _with_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[-2] == heads else x.repeat_interleave(heads // x.shape[-2], dim=-2)
