"""Distributions over tokens, held by the tokens that are possible: after top-k or top-p those are few of many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.device import abilities

_NUCLEUS = 1024  # candidates among which a nucleus is looked for before the whole vocabulary is sorted


@dataclass
class Law:
    """One distribution per row: ``mass[..., c]`` is the probability of token ``ids[..., c]``, or of token ``c`` itself.

    Possible tokens stand there once each, by falling probability, lowest id first among equals (by id where ``ids`` is
    null); some may have mass 0.
    """

    mass: Float[Tensor, "*rows C"]
    ids: Int[Tensor, "*rows C"] | None = None

    def of(self, tokens: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
        """The probability of one token per row."""
        if self.ids is None:
            return self.mass.gather(-1, tokens[..., None])[..., 0]
        return (self.mass * (self.ids == tokens[..., None])).sum(-1)

    def at(self, index: Any) -> Law:
        """Some rows of the law: ``index`` is what would choose them from a tensor of its rows."""
        return Law(self.mass[index], None if self.ids is None else self.ids[index])

    def dense(self, vocab_size: int) -> Float[Tensor, "*rows V"]:
        """The probability of every token."""
        if self.ids is None:
            return self.mass
        return self.mass.new_zeros((*self.mass.shape[:-1], vocab_size)).scatter_add_(-1, self.ids, self.mass)

    @staticmethod
    def joined(laws: Sequence[Law]) -> Law:
        """Laws [B, n] one after another: [B, sum of n]. Narrower ones get further columns, of mass 0, for token 0."""
        if all(law.ids is None for law in laws):
            return Law(torch.cat([law.mass for law in laws], dim=1))
        width = max(law.mass.shape[-1] for law in laws)
        wider = [law.widened(width) for law in laws]
        return Law(torch.cat([mass for mass, _ in wider], dim=1), torch.cat([ids for _, ids in wider], dim=1))

    def widened(self, width: int) -> tuple[Float[Tensor, "*rows {width}"], Int[Tensor, "*rows {width}"]]:
        """Mass and ids in ``width`` columns; those that are added have mass 0, and stand for token 0."""
        ids = self.ids
        if ids is None:
            ids = torch.arange(self.mass.shape[-1], device=self.mass.device).expand(self.mass.shape)
        pad = (0, width - self.mass.shape[-1])
        return nn.functional.pad(self.mass, pad), nn.functional.pad(ids, pad)


def first_argmax(scores: Float[Tensor, "*rows V"]) -> Int[Tensor, "*rows"]:
    """The lowest id with the highest score of each row.

    In two steps where the width allows it: the maximum of every run of 64, then the first run that has the row's. On a
    CPU torch's ``argmax`` is not vectorised, and ten times slower over a whole vocabulary.
    """
    if not abilities(scores.device).own_kernels or scores.shape[-1] % 64:
        return scores.argmax(-1)
    runs = scores.unflatten(-1, (-1, 64))
    best = runs.amax(-1).argmax(-1)
    run = runs.gather(-2, best[..., None, None].expand(*best.shape, 1, 64))[..., 0, :]
    return best * 64 + run.argmax(-1)


def greedy_law(logits: Float[Tensor, "*rows V"]) -> Law:
    """All mass on the argmax."""
    ids = first_argmax(logits)[..., None]
    return Law(torch.ones(ids.shape, device=ids.device), ids)


def truncated_law(scores: Float[Tensor, "*rows V"], top_k: int | None, top_p: float | None) -> Law:
    """Softmax over the ``top_k`` best; of these, those whose predecessors hold less than ``top_p``, renormalised.

    Ties keep the lowest ids, at either border. A ``top_p`` of 1 cuts nothing, and costs nothing.
    """
    if top_p == 1.0:
        top_p = None
    if top_k is not None and top_k < scores.shape[-1]:
        values, ids = highest(scores, top_k)
        mass = values.softmax(-1)
        return Law(mass if top_p is None else _cut(mass, top_p), ids)
    if top_p is None:
        return Law(scores.softmax(-1))
    if scores.shape[-1] > _NUCLEUS and not abilities(scores.device).queues:  # whether it is enough must be read
        values, ids = highest(scores, _NUCLEUS)
        mass = (values - scores.logsumexp(-1, keepdim=True)).exp()
        if bool((mass[..., :-1].sum(-1) >= top_p).all()):
            return Law(_cut(mass, top_p), ids)
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    return Law(_cut(values.softmax(-1), top_p), ids)


def _cut(mass: Tensor, top_p: float) -> Tensor:
    """``mass`` (falling) without what comes after ``top_p`` of it, renormalised."""
    mass = mass.masked_fill(mass.cumsum(-1) - mass >= top_p, 0.0)
    return mass / mass.sum(-1, keepdim=True)


def highest(
    scores: Float[Tensor, "*rows V"], count: int
) -> tuple[Float[Tensor, "*rows {count}"], Int[Tensor, "*rows {count}"]]:
    """Values and ids of exactly the ``count`` best of each row, in falling order, ties by lowest id."""
    values, ids = scores.topk(count)
    last = values[..., -1:]
    # Ties across the border, of which topk took any. Where a look for them would wait, there may be some.
    if abilities(scores.device).queues or int((scores >= last).sum()) > ids.numel():
        tied = scores == last
        keep = (scores > last) | (tied & (tied.cumsum(-1) <= count - (scores > last).sum(-1, keepdim=True)))
        ids = scores.masked_fill(~keep, -torch.inf).topk(count).indices
    ids = ids.sort(-1).values  # ascending, so that the stable sort orders ties by id
    values, order = scores.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)
