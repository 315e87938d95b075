"""``ops.chunked_attention`` on the CPU: between its products there is one pass of ``ops.fused`` each way.

It is for float32 and bfloat16. Products give the dtype of their inputs; what is summed over chunks is float32.

What a slot sees of the context, and of its own block, is one run of rows. So there is no mask: the pass is told where
each run begins and ends, and does not read the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash_lightning.ops.chunked_attention import Chunk, plan_chunks
from dflash_lightning.ops.context import KVSource, made_once
from dflash_lightning.ops.dense_attention import group, ungroup
from dflash_lightning.ops.fused import attend, attend_back


@dataclass
class Plan:
    """Chunks of blocks; for each the columns that its slots see [n K parts 2], the own block being the last part."""

    chunks: list[Chunk]
    ranges: list[Tensor]
    scale: float


def fused_attention(
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
    """As ``block_attention``, where ``ops.fused.can_fuse`` says so of all tensors, which are of one dtype."""

    def make() -> tuple[list[Chunk], list[Tensor]]:
        chunks = plan_chunks(sources, q, window)
        return chunks, _ranges(chunks, sources, q.shape[2], causal=causal, window=window)

    chunks, ranges = made_once(sources, ("fused", causal, window, *q.shape[:3]), make)
    return _FusedAttention.apply(Plan(chunks, ranges, scale), q, k_own, v_own, *keys, *values)


def _ranges(
    chunks: Sequence[Chunk], sources: Sequence[KVSource], block_size: int, *, causal: bool, window: int | None
) -> list[Int[Tensor, "_ K parts 2"]]:
    """(first, end) of what every slot sees of each part, in columns of the chunk's slices."""
    slot = torch.arange(block_size)
    reach = block_size if window is None else window
    own = torch.stack(
        [(slot - reach + 1).clamp(min=0), slot + 1 if causal else (slot + reach).clamp(max=block_size)], -1
    )
    seen = []
    for source in sources:
        first = source.start[..., None].expand(-1, -1, block_size)
        if window is not None:
            first = torch.maximum(first, source.slot_row[..., None] + slot - window + 1)
        seen.append(torch.stack([first, source.end[..., None].expand_as(first)], -1))
    found = []
    for chunk in chunks:
        parts = []
        for rows, (low, high) in zip(seen, chunk.slices, strict=True):
            inside = rows[chunk.row, chunk.first : chunk.last].clamp(low, high) - low
            parts.append(torch.where(inside[..., :1] < inside[..., 1:], inside, 0))
        parts.append(own.expand(chunk.last - chunk.first, -1, -1))
        found.append(torch.stack(parts, dim=2).to(torch.int32).contiguous())
    return found


class _Piece:
    """One chunk's tensors, flat: queries [h rows D], own keys and values per block [h*n K D], the context's [h R D]."""

    def __init__(self, plan: Plan, chunk: Chunk, q: Tensor, own: Sequence[Tensor], context: Sequence[Tensor]) -> None:
        self.at = chunk.row, slice(chunk.first, chunk.last)
        self.heads = own[0].shape[3]
        n, self.slots, queries, self.width = q[self.at].shape
        self.size = (self.heads, n, queries // self.heads, self.slots)
        self.per_block = (self.heads * n, queries // self.heads * self.slots)
        self.queries = self.rows(q)
        self.keys, self.values = (x[self.at].permute(2, 0, 1, 3).reshape(-1, self.slots, self.width) for x in own)
        half = len(chunk.slices)
        spans = [(chunk.row, slice(low, high)) for low, high in chunk.slices]
        self.context_keys = [x[span].transpose(0, 1) for x, span in zip(context[:half], spans, strict=True)]
        self.context_values = [x[span].transpose(0, 1) for x, span in zip(context[half:], spans, strict=True)]
        self.spans = spans

    def rows(self, x: Float[Tensor, "B N K Hq D"]) -> Float[Tensor, "h rows D"]:
        """The chunk's rows of ``x`` by key-value head."""
        return group(x[self.at][None], self.heads).reshape(self.heads, -1, self.width).contiguous()

    def across(
        self, x: Float[Tensor, "h rows D"], context: Sequence[Tensor], own: Float[Tensor, "hn K D"]
    ) -> list[Float[Tensor, "h rows _"]]:
        """``x`` times every row of the context parts and of the own block."""
        mine = torch.bmm(x.view(*self.per_block, -1), own.transpose(1, 2)).view(self.heads, -1, self.slots)
        return [*(torch.bmm(x, part.transpose(1, 2)) for part in context), mine]

    def gather(
        self, weights: Sequence[Tensor], context: Sequence[Tensor], own: Float[Tensor, "hn K D"]
    ) -> Float[Tensor, "h rows D"]:
        """The sums of the rows of all parts, weighted."""
        total = torch.bmm(weights[-1].view(*self.per_block, self.slots), own).view(self.heads, -1, self.width)
        for weight, part in zip(weights, context, strict=False):
            torch.baddbmm(total, weight, part, out=total)
        return total

    def back(self, x: Float[Tensor, "h rows D"]) -> Float[Tensor, "n K Hq D"]:
        """Rows in the order of slots."""
        return ungroup(x.view(1, *self.size, self.width))[0]

    def own_gradient(self, weight: Tensor, x: Float[Tensor, "h rows D"]) -> Float[Tensor, "n K h D"]:
        """What ``weight`` [h rows K] brings of the rows of ``x`` to the own block's."""
        found = torch.bmm(weight.view(*self.per_block, self.slots).transpose(1, 2), x.view(*self.per_block, -1))
        return found.view(self.heads, -1, self.slots, self.width).permute(1, 2, 0, 3)


class _FusedAttention(torch.autograd.Function):
    """Keeps its inputs and one log-sum-exp per slot and head."""

    @staticmethod
    def forward(ctx, plan: Plan, q: Tensor, k_own: Tensor, v_own: Tensor, *context: Tensor) -> Tensor:
        out = torch.empty_like(q)
        sums = []
        with torch.autocast("cpu", enabled=False):
            for chunk, ranges in zip(plan.chunks, plan.ranges, strict=True):
                piece = _Piece(plan, chunk, q, (k_own, v_own), context)
                scores = piece.across(piece.queries, piece.context_keys, piece.keys)
                sums.append(attend(scores, ranges, piece.size, plan.scale))
                out[piece.at] = piece.back(piece.gather(scores, piece.context_values, piece.values))
        ctx.plan = plan
        ctx.save_for_backward(q, k_own, v_own, *context, *sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        plan: Plan = ctx.plan
        q, k_own, v_own, *rest = ctx.saved_tensors
        count = len(ctx.needs_input_grad) - 4
        context, sums = rest[:count], rest[count:]
        to_q, to_k, to_v = (torch.empty_like(x) for x in (q, k_own, v_own))
        wanted = ctx.needs_input_grad[4:]
        to_context = [
            torch.zeros_like(x, dtype=torch.float32) if yes else None for x, yes in zip(context, wanted, strict=True)
        ]
        with torch.autocast("cpu", enabled=False):
            for chunk, ranges, lse in zip(plan.chunks, plan.ranges, sums, strict=True):
                piece = _Piece(plan, chunk, q, (k_own, v_own), context)
                incoming = piece.rows(grad)
                weights = piece.across(piece.queries, piece.context_keys, piece.keys)
                slopes = piece.across(incoming, piece.context_values, piece.values)
                attend_back(weights, slopes, ranges, lse, piece.size, plan.scale)
                to_q[piece.at] = piece.back(piece.gather(slopes, piece.context_keys, piece.keys))
                to_k[piece.at] = piece.own_gradient(slopes[-1], piece.queries)
                to_v[piece.at] = piece.own_gradient(weights[-1], incoming)
                parts = [*((slope, piece.queries) for slope in slopes[:-1]), *((w, incoming) for w in weights[:-1])]
                for total, (weight, x), span in zip(to_context, parts, [*piece.spans, *piece.spans], strict=True):
                    if total is not None:
                        _add_product(total[span].transpose(0, 1), weight.transpose(1, 2), x)
        found = [None if g is None else g.to(x.dtype) for g, x in zip(to_context, context, strict=True)]
        return None, to_q, to_k, to_v, *found


def _add_product(total: Float[Tensor, "h R D"], weight: Float[Tensor, "h R r"], x: Float[Tensor, "h r D"]) -> None:
    """``total += weight @ x``, where ``total`` may be of a wider dtype."""
    if total.dtype == x.dtype:
        torch.baddbmm(total, weight, x, out=total)
    else:
        total += torch.bmm(weight, x)
