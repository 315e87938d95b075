"""The few likeliest tokens of every slot: their logits, laws over them alone, and where a token stands among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash_lightning.ops.chunks import chunk_bytes, cut
from dflash_lightning.ops.language_head import LanguageHead

# The logit of a token that is no candidate, where a law over candidates is spread over the vocabulary. Its probability
# is exactly 0 in fp32; minus infinity would make 0 * inf in entropies and divergences.
NO_CANDIDATE = -1e4


@dataclass
class Candidates:
    """What a head chooses among in a training batch, slot by slot.

    ``ids`` are the ``k`` likeliest tokens of the base law, best first; -1 where a slot predicts nothing. ``scores`` are
    logits over them, given the data's own tokens before the slot. They mean nothing where the head needs the token
    before the slot to be a candidate of its own slot, and it is none. ``of_label`` is the score of the data's own
    token, for heads that can say it of any token.
    """

    ids: Int[Tensor, "B N K k"]
    scores: Float[Tensor, "B N K k"]
    of_label: Float[Tensor, "B N K"] | None = None


def place_of(
    tokens: Int[Tensor, "*slots"], ids: Int[Tensor, "*slots k"]
) -> tuple[Int[Tensor, "*slots"], Bool[Tensor, "*slots"]]:
    """Where each token stands among the candidates of its slot, and whether it does; 0 where it is none of them."""
    same = (ids == tokens[..., None]) & (ids >= 0)
    return (same * torch.arange(ids.shape[-1], device=ids.device)).sum(-1), same.any(-1)


def spread_law(
    scores: Float[Tensor, "*rows k"], columns: Int[Tensor, "*rows k"], size: int
) -> Float[Tensor, "*rows V"]:
    """Logits over ``size`` columns whose softmax is that of the candidates' ``scores``, and 0 elsewhere."""
    empty = scores.new_full((*scores.shape[:-1], size), NO_CANDIDATE)
    return empty.scatter(-1, columns, scores)


def token_ids(lm: LanguageHead, columns: Int[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
    """Token ids of logit columns."""
    return columns if lm.ids is None else lm.ids[columns]


def logits_at(lm: LanguageHead, hidden: Float[Tensor, "R H"], columns: Int[Tensor, "R k"]) -> Float[Tensor, "R k"]:
    """Logits of a few columns of each row, in fp32 (or wider), with a gradient to ``hidden``.

    Only these rows of the language head are read; they are read again in the backward pass and never kept.
    """
    wide = torch.promote_types(torch.float32, lm.weight.dtype)
    product = _ColumnsOf.apply(hidden.to(wide), lm.weight.detach(), columns)
    if lm.bias is not None:
        product = product + lm.bias.detach().to(wide)[columns]
    return lm.activate(product)


class _ColumnsOf(torch.autograd.Function):
    """``hidden[r] . weight[columns[r, j]]`` for frozen ``weight`` [V H]: hidden [R H], columns and the result [R k]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(weight, columns)
        found = hidden.new_empty(columns.shape)
        for rows in _pieces(weight, columns):
            found[rows] = _multiply(_rows_of(weight, columns[rows], hidden.dtype), hidden[rows][..., None])[..., 0]
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None, None]:
        weight, columns = ctx.saved_tensors
        gradient = incoming.new_empty(len(columns), weight.shape[1])
        for rows in _pieces(weight, columns):
            those = _rows_of(weight, columns[rows], incoming.dtype)
            gradient[rows] = _multiply(incoming[rows][:, None], those)[:, 0]
        return gradient, None, None


def _multiply(one: Float[Tensor, "r a b"], other: Float[Tensor, "r b c"]) -> Float[Tensor, "r a c"]:
    with torch.autocast(one.device.type, enabled=False):
        return torch.bmm(one, other)


def _rows_of(weight: Float[Tensor, "V H"], columns: Int[Tensor, "r k"], dtype: torch.dtype) -> Float[Tensor, "r k H"]:
    return weight.index_select(0, columns.flatten()).view(*columns.shape, -1).to(dtype)


def _pieces(weight: Tensor, columns: Tensor) -> list[slice]:
    """Runs of rows whose share of the head fills a chunk at most."""
    size = 4 * max(1, columns.shape[-1] * weight.shape[1])
    return cut(len(columns), max(1, chunk_bytes(weight.device) // size))
