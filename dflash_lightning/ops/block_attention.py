"""Attention of draft blocks: every slot reads its context interval and its own block under one softmax.

```
#        context 0 1 2 3 4 | own block, anchor 3      end = 3, slot_row = 3
# slot 0         x x x . . | x x x                    slot_row + i - j < window narrows the left edge, slot by slot
# slot 1         x x x . . | x x x
```
Visibility is decided by row numbers only, never by block numbers: overlapping blocks must not see what their own anchor
could not. Neither a score nor a mask of shape [N*K, S + N*K] ever exists: blocks are sorted, so a
chunk of neighbours shares one narrow slice of the context, and its probabilities are computed again in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash_lightning.device import abilities
from dflash_lightning.lazy import LazyModule
from dflash_lightning.ops.context import KVSource, made_once
from dflash_lightning.ops.norm import compute_dtype

CHUNK_SLOTS = 64  # slots of one chunk: matrices large enough for the CPU, context slices narrow enough to skip the rest
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
    to one static graph; many blocks go through ``flex_attention`` on CUDA and through the chunked path below elsewhere
    (flex has no CPU backward).
    ``dense`` takes the first way for any number of blocks: for a few short ones, as the lanes of a draft are.
    """
    num_blocks, block_size = q.shape[1:3]
    own = own_visible(block_size, causal=causal, window=window, device=q.device)
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
        parts = list(zip(keys, values, seen, strict=True))
        with torch.autocast(q.device.type, enabled=False):
            return _attend(q, k_own, v_own, own, parts, scale)[0]
    if abilities(q.device).flex:
        return _FLEX.flex_block_attention(
            q, k_own, v_own, keys, values, sources, causal=causal, window=window, scale=scale
        )
    chunks = made_once(sources, ("chunks", window, *q.shape[:3]), lambda: _plan_chunks(sources, q, window))
    plan = _Plan(sources, own, window, scale, chunks)
    return _ChunkedAttention.apply(plan, q, k_own, v_own, *keys, *values)


def context_visible(
    rows: Int[Tensor, " R"],
    interval: tuple[Int[Tensor, "B N"], Int[Tensor, "B N"], Int[Tensor, "B N"]],
    *,
    block_size: int,
    window: int | None,
) -> Bool[Tensor, "B N k R"]:
    """Which context ``rows`` each slot sees, given (start, end, slot_row); ``k`` is 1 where all slots see the same."""
    start, end, slot_row = interval
    seen = (rows >= start[..., None]) & (rows < end[..., None])
    if window is None:
        return seen[:, :, None]
    slot_rows = slot_row[..., None] + torch.arange(block_size, device=rows.device)
    return seen[:, :, None] & (slot_rows[..., None] - rows < window)


def own_visible(block_size: int, *, causal: bool, window: int | None, device: torch.device) -> Bool[Tensor, "K K"]:
    """Which slots ``j`` (columns) of its own block slot ``i`` (row) sees."""
    slots = torch.arange(block_size, device=device)
    distance = slots[:, None] - slots[None, :]
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance.abs() < window)


@dataclass
class _Chunk:
    """Blocks ``first .. last - 1`` of batch row ``row``, and the slice of every source that any of them can see."""

    row: int
    first: int
    last: int
    slices: list[tuple[int, int]]


@dataclass
class _Plan:
    sources: Sequence[KVSource]
    own: Tensor
    window: int | None
    scale: float
    chunks: list[_Chunk]


def _plan_chunks(sources: Sequence[KVSource], q: Tensor, window: int | None) -> list[_Chunk]:
    """Neighbouring blocks in pieces of about ``CHUNK_SLOTS`` slots, with the context rows they need.

    Reads tensor values, which costs nothing on a CPU. Where that would wait, every chunk is given the whole context:
    its mask hides what no slot sees.
    """
    batch, num_blocks, block_size = q.shape[:3]
    step = max(1, CHUNK_SLOTS // block_size)
    if abilities(q.device).queues:
        whole = [(0, source.k.shape[1]) for source in sources]
        return [
            _Chunk(row, first, min(first + step, num_blocks), whole)
            for row in range(batch)
            for first in range(0, num_blocks, step)
        ]
    intervals = []
    for source in sources:
        start = source.start
        if window is not None:
            start = torch.maximum(start, source.slot_row - window + 1)
        start = torch.where(start < source.end, start, source.k.shape[1])  # a block without context asks for nothing
        intervals.append((start.tolist(), source.end.tolist()))
    chunks = []
    for row in range(batch):
        for first in range(0, num_blocks, step):
            last = min(first + step, num_blocks)
            slices = []
            for starts, ends in intervals:
                low, high = min(starts[row][first:last]), max(ends[row][first:last])
                slices.append((low, high) if low < high else (0, 0))
            chunks.append(_Chunk(row, first, last, slices))
    return chunks


def _with_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[-2] == heads else x.repeat_interleave(heads // x.shape[-2], dim=-2)


def _group(q: Float[Tensor, "b n K Hq D"], heads: int) -> Float[Tensor, "b heads n G K D"]:
    b, n, k, hq, d = q.shape
    return q.reshape(b, n, k, heads, hq // heads, d).permute(0, 3, 1, 4, 2, 5)


def _ungroup(x: Float[Tensor, "b heads n G K D"]) -> Float[Tensor, "b n K Hq D"]:
    b, heads, n, g, k, d = x.shape
    return x.permute(0, 2, 4, 1, 3, 5).reshape(b, n, k, heads * g, d)


def _scores(
    q: Float[Tensor, "b h n G K D"],
    k_own: Float[Tensor, "b h n K D"],
    own: Bool[Tensor, "K K"],
    contexts: Sequence[tuple[Tensor, Tensor]],
    scale: float,
) -> list[Tensor]:
    """Masked, scaled scores [b, h, n, G, K, columns] in ``compute_dtype``: own block first, then every context.

    A context is (keys [b, R, h, D], visible [b, n, k, R]).
    """
    dtype = compute_dtype(q.dtype)
    b, h, n, g, k, d = q.shape
    early = q.dtype == dtype  # scaling q is cheaper than scaling scores, but would round twice in bf16
    if early:
        q = q * scale
    scores = []
    for keys, seen in [(None, own), *contexts]:
        if keys is None:
            product = q.reshape(b, h, n, g * k, d) @ k_own.transpose(-1, -2)
        else:
            product = q.reshape(b, h, n * g * k, d) @ keys.permute(0, 2, 3, 1)
            seen = seen[:, None, :, None]
        score = product.view(b, h, n, g, k, -1)
        score = score if early else score.to(dtype).mul_(scale)
        scores.append(score.masked_fill_(~seen, float("-inf")))
    return scores


def _attend(
    q: Float[Tensor, "b n K Hq D"],
    k_own: Float[Tensor, "b n K h D"],
    v_own: Float[Tensor, "b n K h D"],
    own: Bool[Tensor, "K K"],
    parts: Sequence[tuple[Tensor, Tensor, Tensor]],
    scale: float,
) -> tuple[Float[Tensor, "b n K Hq D"], Float[Tensor, "b h n G K"]]:
    """Output and log-sum-exp over the own block and all ``parts`` (keys, values [b, R, h, D], visible [b, n, k, R])."""
    heads = k_own.shape[3]
    grouped = _group(q, heads)
    b, h, n, g, k, d = grouped.shape
    parts = [part for part in parts if part[0].shape[1]]
    scores = _scores(grouped, k_own.permute(0, 3, 1, 2, 4), own, [(keys, seen) for keys, _, seen in parts], scale)
    top = scores[0].amax(-1)  # never -inf: a slot sees itself
    for score in scores[1:]:
        top = torch.maximum(top, score.amax(-1))
    weights = [(score - top[..., None]).exp_() for score in scores]
    total = weights[0].sum(-1)
    for weight in weights[1:]:
        total = total + weight.sum(-1)
    weights = [weight.to(q.dtype) for weight in weights]
    mine = weights[0].reshape(b, h, n, g * k, k) @ v_own.permute(0, 3, 1, 2, 4)
    out = mine.view(b, h, n, g, k, d).to(total.dtype)
    for weight, (_, values, _) in zip(weights[1:], parts, strict=True):
        out = out + (weight.reshape(b, h, n * g * k, -1) @ values.permute(0, 2, 1, 3)).view(b, h, n, g, k, d)
    return _ungroup(out / total[..., None]).to(q.dtype), top + total.log()


class _ChunkedAttention(torch.autograd.Function):
    """The chunked path. Saves inputs, output and one log-sum-exp per slot and head; never a probability."""

    @staticmethod
    def forward(ctx, plan: _Plan, q: Tensor, k_own: Tensor, v_own: Tensor, *context: Tensor) -> Tensor:
        keys, values = context[: len(plan.sources)], context[len(plan.sources) :]
        out = torch.empty_like(q)
        sums = []
        with torch.autocast(q.device.type, enabled=False):
            for chunk in plan.chunks:
                at = slice(chunk.row, chunk.row + 1), slice(chunk.first, chunk.last)
                parts = [
                    (k[at[0], low:high], v[at[0], low:high], seen)
                    for k, v, (low, high), seen in zip(
                        keys, values, chunk.slices, _visible(plan, chunk, q), strict=True
                    )
                ]
                out[at], lse = _attend(q[at], k_own[at], v_own[at], plan.own, parts, plan.scale)
                sums.append(lse)
        ctx.plan = plan
        ctx.save_for_backward(q, k_own, v_own, out, *context, *sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        plan: _Plan = ctx.plan
        q, k_own, v_own, out, *rest = ctx.saved_tensors
        count = len(plan.sources)
        context, sums = rest[: 2 * count], rest[2 * count :]
        wide = compute_dtype(q.dtype)
        grads = [torch.zeros_like(x, dtype=wide) for x in (q, k_own, v_own, *context)]
        with torch.autocast(q.device.type, enabled=False):
            for chunk, lse in zip(plan.chunks, sums, strict=True):
                _chunk_backward(plan, chunk, (q, k_own, v_own, out, grad), context, lse, grads)
        return None, *(g.to(x.dtype) for g, x in zip(grads, (q, k_own, v_own, *context), strict=True))


def _visible(plan: _Plan, chunk: _Chunk, q: Tensor) -> list[Bool[Tensor, "1 n k R"]]:
    at = slice(chunk.row, chunk.row + 1), slice(chunk.first, chunk.last)
    seen = []
    for source, (low, high) in zip(plan.sources, chunk.slices, strict=True):
        interval = source.start[at], source.end[at], source.slot_row[at]
        rows = torch.arange(low, high, device=q.device)
        seen.append(context_visible(rows, interval, block_size=q.shape[2], window=plan.window))
    return seen


def _chunk_backward(
    plan: _Plan, chunk: _Chunk, tensors: tuple[Tensor, ...], context: Sequence[Tensor], lse: Tensor, grads: list[Tensor]
) -> None:
    """Add this chunk's share to ``grads`` (of q, k_own, v_own, then keys and values of every source)."""
    at = slice(chunk.row, chunk.row + 1), slice(chunk.first, chunk.last)
    q, k_own, v_own, out, grad = (x[at] for x in tensors)
    count, heads = len(plan.sources), k_own.shape[3]
    q, out, grad = _group(q, heads), _group(out, heads), _group(grad, heads)
    k_own, v_own = k_own.permute(0, 3, 1, 2, 4), v_own.permute(0, 3, 1, 2, 4)
    b, h, n, g, k, d = q.shape
    spans = [(slice(chunk.row, chunk.row + 1), slice(low, high)) for low, high in chunk.slices]
    keys = [x[span] for x, span in zip(context[:count], spans, strict=True)]
    values = [x[span] for x, span in zip(context[count:], spans, strict=True)]
    seen = _visible(plan, chunk, tensors[0])
    scores = _scores(q, k_own, plan.own, list(zip(keys, seen, strict=True)), plan.scale)
    dot = (out.to(lse.dtype) * grad).sum(-1, keepdim=True)  # [b, h, n, G, K, 1]: sum over columns of p * dp

    def weights(index: int) -> Tensor:
        return scores[index].sub_(lse[..., None]).exp_()

    def slope(weight: Tensor, dp: Tensor) -> Tensor:
        dp = dp.view_as(weight)
        dp = dp.sub_(dot) if dp.dtype == dot.dtype else dp - dot
        return dp.mul_(weight).to(q.dtype)

    per_block, flat = (b, h, n, g * k), (b, h, n * g * k)
    scaled = (q.to(lse.dtype) * plan.scale).to(q.dtype)
    weight = weights(0)
    ds = slope(weight, grad.reshape(*per_block, d) @ v_own.transpose(-1, -2)).view(*per_block, k)
    dq = (ds @ k_own).reshape(*flat, d).to(lse.dtype)
    grads[1][at] += (ds.transpose(-1, -2) @ scaled.reshape(*per_block, d)).permute(0, 2, 3, 1, 4)
    weight = weight.to(q.dtype).view(*per_block, k)
    grads[2][at] += (weight.transpose(-1, -2) @ grad.reshape(*per_block, d)).permute(0, 2, 3, 1, 4)
    scaled, grad = scaled.reshape(*flat, d), grad.reshape(*flat, d)
    for i, span in enumerate(spans):
        weight = weights(1 + i)
        ds = slope(weight, grad @ values[i].permute(0, 2, 3, 1)).view(*flat, -1)
        dq += ds @ keys[i].permute(0, 2, 1, 3)
        grads[3 + i][span] += (ds.transpose(-1, -2) @ scaled).permute(0, 2, 1, 3)
        weight = weight.to(q.dtype).view(*flat, -1)
        grads[3 + count + i][span] += (weight.transpose(-1, -2) @ grad).permute(0, 2, 1, 3)
    grads[0][at] = _ungroup(dq.view(b, h, n, g, k, d) * plan.scale)
