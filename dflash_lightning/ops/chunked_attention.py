"""Attention of many blocks in chunks of neighbours, each over the narrow slice of the context that it can see.

Neither a score nor a mask of shape [N*K, S + N*K] ever exists, and a chunk's probabilities are computed again in the
backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash_lightning.device import abilities
from dflash_lightning.ops.context import KVSource, made_once
from dflash_lightning.ops.dense_attention import attend, context_visible, group, masked_scores, own_visible, ungroup
from dflash_lightning.ops.norm import compute_dtype

CHUNK_SLOTS = 64  # slots of one chunk: matrices large enough for the CPU, context slices narrow enough to skip the rest


def chunked_attention(
    q: Float[Tensor, "B N K Hq D"],
    k_own: Float[Tensor, "B N K H D"],
    v_own: Float[Tensor, "B N K H D"],
    keys: Sequence[Float[Tensor, "B _ H D"]],
    values: Sequence[Float[Tensor, "B _ H D"]],
    sources: Sequence[KVSource],
    *,
    causal: bool,
    window: int | None,
    scale: float,
) -> Float[Tensor, "B N K Hq D"]:
    """As ``block_attention``, with the heads of keys and values repeated to H already."""
    chunks = made_once(sources, ("chunks", window, *q.shape[:3]), lambda: plan_chunks(sources, q, window))
    own = own_visible(q.shape[2], causal=causal, window=window, device=q.device)
    return _ChunkedAttention.apply(_Plan(sources, own, window, scale, chunks), q, k_own, v_own, *keys, *values)


@dataclass
class Chunk:
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
    chunks: list[Chunk]


def plan_chunks(sources: Sequence[KVSource], q: Tensor, window: int | None) -> list[Chunk]:
    """Neighbouring blocks of ``q`` [B N K Hq D] in pieces of about ``CHUNK_SLOTS`` slots, with the context they need.

    Reads tensor values, which costs nothing on a CPU. Where that would wait, every chunk is given the whole context:
    its mask hides what no slot sees.

    Raises:
        ValueError: an interval reaches beyond its source's rows.
    """
    batch, num_blocks, block_size = q.shape[:3]
    step = max(1, CHUNK_SLOTS // block_size)
    if abilities(q.device).queues:
        whole = [(0, source.k.shape[1]) for source in sources]
        return [
            Chunk(row, first, min(first + step, num_blocks), whole)
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
                _check_rows(sources[len(slices) - 1], *slices[-1])
            chunks.append(Chunk(row, first, last, slices))
    return chunks


def _check_rows(source: KVSource, low: int, high: int) -> None:
    rows = source.k.shape[1]
    if low < 0 or high > rows:  # compiled passes would read memory that is not the source's
        raise ValueError(
            f"attention: blocks are to see rows {low}..{high - 1} of a source that has {rows}. Keep start at 0 or more "
            "and end at the number of rows or less where the conditioning makes its KVSource."
        )


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
                out[at], lse = attend(q[at], k_own[at], v_own[at], plan.own, parts, plan.scale)
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


def _visible(plan: _Plan, chunk: Chunk, q: Tensor) -> list[Bool[Tensor, "1 n k R"]]:
    at = slice(chunk.row, chunk.row + 1), slice(chunk.first, chunk.last)
    seen = []
    for source, (low, high) in zip(plan.sources, chunk.slices, strict=True):
        interval = source.start[at], source.end[at], source.slot_row[at]
        rows = torch.arange(low, high, device=q.device)
        seen.append(context_visible(rows, interval, block_size=q.shape[2], window=plan.window))
    return seen


def _chunk_backward(
    plan: _Plan, chunk: Chunk, tensors: tuple[Tensor, ...], context: Sequence[Tensor], lse: Tensor, grads: list[Tensor]
) -> None:
    """Add this chunk's share to ``grads`` (of q, k_own, v_own, then keys and values of every source)."""
    at = slice(chunk.row, chunk.row + 1), slice(chunk.first, chunk.last)
    q, k_own, v_own, out, grad = (x[at] for x in tensors)
    count, heads = len(plan.sources), k_own.shape[3]
    q, out, grad = group(q, heads), group(out, heads), group(grad, heads)
    k_own, v_own = k_own.permute(0, 3, 1, 2, 4), v_own.permute(0, 3, 1, 2, 4)
    b, h, n, g, k, d = q.shape
    spans = [(slice(chunk.row, chunk.row + 1), slice(low, high)) for low, high in chunk.slices]
    keys = [x[span] for x, span in zip(context[:count], spans, strict=True)]
    values = [x[span] for x, span in zip(context[count:], spans, strict=True)]
    seen = _visible(plan, chunk, tensors[0])
    scores = masked_scores(q, k_own, plan.own, list(zip(keys, seen, strict=True)), plan.scale)
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
    grads[0][at] = ungroup(dq.view(b, h, n, g, k, d) * plan.scale)
