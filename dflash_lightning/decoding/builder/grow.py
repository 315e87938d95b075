"""Trees grown depth by depth, several lanes at once, for laws that depend on the tokens of a path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dflash_lightning.decoding.builder.steps import as_steps
from dflash_lightning.decoding.law import highest
from dflash_lightning.decoding.types import Scores
from dflash_lightning.types import gather_lanes, token_ids

# ``children(laws of the lanes, depth, count)``: log-probabilities and tokens [B W count] of every lane's best children.
Children = Callable[[Scores, int, int], tuple[Tensor, Tensor]]


@dataclass
class Pool:
    """Candidates for nodes, those of lower depth first: score of the path, token, place of the parent.

    Places count from 1; 0 is the root. The score is the log-probability of the path, and the bonus of the depth.
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

    def masses(self, budget: int) -> Float[Tensor, "B {budget}"]:
        """``exp`` of the scores of ``best``: probabilities of paths, where depth has no bonus; 0 where none is left."""
        found = self.values.sort(dim=1, descending=True).values[:, :budget].exp()
        return nn.functional.pad(found, (0, budget - found.shape[1]))


def likeliest(laws: Scores, depth: int, count: int) -> tuple[Float[Tensor, "B W K"], Int[Tensor, "B W K"]]:
    """The ``count`` likeliest children of every lane under its own law."""
    logits = laws.logits.float()
    best, places = highest(logits, min(count, logits.shape[-1]))
    return best - logits.logsumexp(-1, keepdim=True), token_ids(places, laws.ids)


def grow(
    roots: Int[Tensor, " B"],
    scores: Scores,
    *,
    widths: list[int],
    branch: int,
    keep_all: bool = False,
    bonus: Callable[[int], float] | None = None,
    children: Children = likeliest,
) -> Pool:
    """Candidates of the first ``len(widths)`` depths.

    At each depth every lane offers its ``branch`` best children, and the best ``widths[depth]`` of all of them are the
    lanes of the next depth. Candidates are those lanes, or with ``keep_all`` every child offered. ``bonus(depth)``,
    which must not rise with the depth, is added where candidates are compared across depths.
    """
    step, state, last = as_steps(scores), scores.state, roots[:, None]
    reached, above = last.new_zeros(last.shape, dtype=torch.float32), torch.zeros_like(last)
    pools: list[Pool] = []
    size, added = 1, bonus or (lambda depth: 0.0)
    for depth, width in enumerate(widths):
        laws, state = step(state, last, depth)
        offered = _offered(*children(laws, depth, branch), reached, above)
        order = offered.values.argsort(dim=1, descending=True, stable=True)[:, :width]
        lanes = Pool(*(column.gather(1, order) for column in vars(offered).values()))
        pools.append(offered if keep_all else lanes)
        above = size + (order if keep_all else torch.arange(order.shape[1], device=order.device).expand_as(order))
        size += pools[-1].values.shape[1]
        state = gather_lanes(state, order // (offered.values.shape[1] // last.shape[1]))
        reached, last = lanes.values, lanes.tokens
    return Pool(
        torch.cat([pool.values + added(depth) for depth, pool in enumerate(pools, start=1)], dim=1),
        torch.cat([pool.tokens for pool in pools], dim=1),
        torch.cat([pool.parents for pool in pools], dim=1),
    )


def _offered(
    values: Float[Tensor, "B W K"],
    tokens: Int[Tensor, "B W K"],
    reached: Float[Tensor, "B W"],
    above: Int[Tensor, "B W"],
) -> Pool:
    """All children of all lanes, lane by lane."""
    values = reached[..., None] + values
    return Pool(values.flatten(1), tokens.flatten(1), above[..., None].expand(values.shape).flatten(1))
