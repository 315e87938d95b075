"""Shapes for sampled trees, planned along the likeliest paths and frozen before anything is drawn."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dflash_lightning.decoding.builder.draft_law import draft_law
from dflash_lightning.decoding.builder.grow import grow
from dflash_lightning.decoding.builder.shape import Shape
from dflash_lightning.decoding.law import highest
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Scores
from dflash_lightning.ops.ancestry import ancestors_or_self
from dflash_lightning.types import token_ids


def plan_by_paths(roots: Int[Tensor, " B"], scores: Scores, budget: int, sampler: Sampler) -> Shape:
    """The best ``budget`` paths under the warped laws after their own tokens, of which only ranks are kept.

    The ``j``-th likeliest child of a planned node stands for the ``j``-th draw at the node in its place. No draw is
    looked at, for none is made yet; so the shape is frozen, and refilling it with draws is lossless.
    """

    def children(laws: Scores, depth: int, count: int) -> tuple[Float[Tensor, "B W K"], Int[Tensor, "B W K"]]:
        law = draft_law(laws.logits, laws.ids, sampler)
        mass, places = highest(law.mass, min(count, law.mass.shape[-1]))
        return mass.log(), token_ids(places, law.ids)

    num_drafts = scores.logits.shape[1]
    pool = grow(roots, scores, widths=[budget] * num_drafts, branch=budget, children=children)
    _, parents, live = pool.best(budget)
    missing = (0, budget - parents.shape[1])
    return shape_of(torch.nn.functional.pad(parents, missing), torch.nn.functional.pad(live, missing))


def shape_of(parents: Int[Tensor, "B K"], live: Bool[Tensor, "B K"]) -> Shape:
    """The shape of a tree whose nodes stand best first, from node 1 on; ranks are the order among siblings."""
    parents = torch.nn.functional.pad(parents, (1, 0))
    live = torch.nn.functional.pad(live, (1, 0), value=True)
    index = torch.arange(parents.shape[1], device=parents.device)
    earlier = (parents[:, :, None] == parents[:, None, :]) & (index < index[:, None]) & (index > 0)
    ranks = torch.where(live, (earlier & live[:, None]).sum(-1), 0)
    depths = torch.where(live, ancestors_or_self(parents).sum(-1) - 1, 0)
    return Shape(parents, ranks, depths, live, height=int(depths.max()))
