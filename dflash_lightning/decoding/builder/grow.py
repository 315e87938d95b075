"""Trees grown depth by depth, several lanes at once, for laws that depend on the tokens of a path."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dflash_lightning.decoding.builder.draft_law import token_ids
from dflash_lightning.decoding.builder.steps import as_steps
from dflash_lightning.decoding.law import highest
from dflash_lightning.decoding.types import Scores
from dflash_lightning.types import gather_lanes


@dataclass
class Pool:
    """Candidates for nodes, those of lower depth first: log-probability of the path, token, place of the parent.

    Places count from 1; 0 is the root.
    """

    values: Float[Tensor, "B M"]
    tokens: Int[Tensor, "B M"]
    parents: Int[Tensor, "B M"]

    def best(self, budget: int) -> tuple[Int[Tensor, "B K"], Int[Tensor, "B K"], Bool[Tensor, "B K"]]:
        """Tokens, parents and liveness of the best ``budget``, best first, earlier ones first among equals.

        A parent is never worse than its child and stands before it, so it is among the best if the child is.
        """
        order = self.values.argsort(dim=1, descending=True, stable=True)[:, :budget]
        ranks = torch.arange(1, order.shape[1] + 1, device=order.device).expand_as(order)
        node = order.new_zeros(len(order), self.values.shape[1] + 1).scatter(1, order + 1, ranks)
        live = self.values.gather(1, order) > -torch.inf
        parents = node.gather(1, self.parents.gather(1, order))
        return self.tokens.gather(1, order), torch.where(live, parents, 0), live


def grow(
    roots: Int[Tensor, " B"],
    scores: Scores,
    *,
    widths: list[int],
    branch: int,
    keep_all: bool = False,
    depth_bonus: float = 0.0,
) -> Pool:
    """Candidates of the first ``len(widths)`` depths.

    At each depth every lane offers its ``branch`` likeliest children, and the best ``widths[depth]`` of all of them are
    the lanes of the next depth. Candidates are those lanes, or with ``keep_all`` every child offered. ``depth_bonus``
    (0 or less) is added per depth where candidates are compared across depths.
    """
    step, state, last = as_steps(scores), scores.state, roots[:, None]
    reached, above = last.new_zeros(last.shape, dtype=torch.float32), torch.zeros_like(last)
    pools: list[Pool] = []
    size = 1
    for depth, width in enumerate(widths):
        laws, state = step(state, last, depth)
        children = _children(laws, reached, above, branch)
        order = children.values.argsort(dim=1, descending=True, stable=True)[:, :width]
        lanes = Pool(*(column.gather(1, order) for column in vars(children).values()))
        pools.append(children if keep_all else lanes)
        above = size + (order if keep_all else torch.arange(order.shape[1], device=order.device).expand_as(order))
        size += pools[-1].values.shape[1]
        reached, last = lanes.values, lanes.tokens
        state = gather_lanes(state, order // (children.values.shape[1] // laws.logits.shape[1]))
    return Pool(
        torch.cat([pool.values + depth_bonus * depth for depth, pool in enumerate(pools, start=1)], dim=1),
        torch.cat([pool.tokens for pool in pools], dim=1),
        torch.cat([pool.parents for pool in pools], dim=1),
    )


def _children(laws: Scores, reached: Float[Tensor, "B W"], above: Int[Tensor, "B W"], branch: int) -> Pool:
    """The ``branch`` likeliest children of every lane, lane by lane."""
    logits = laws.logits.float()
    best, places = highest(logits, min(branch, logits.shape[-1]))
    values = reached[..., None] + best - logits.logsumexp(-1, keepdim=True)
    parents = above[..., None].expand(values.shape)
    return Pool(values.flatten(1), token_ids(places, laws.ids).flatten(1), parents.flatten(1))
