"""Trees by how likely a node is to be reached, per what it costs (TAPS, arXiv 2606.00487)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from dflash_lightning.decoding.builder.base import DraftBuilder
from dflash_lightning.decoding.builder.best_first import check_budget, tree_of_pool
from dflash_lightning.decoding.builder.grow import grow
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Round, Scores
from dflash_lightning.errors import SettingError


class ReachTree(DraftBuilder):
    """The ``budget`` nodes of the highest ``reach / cost(depth)``, from a pool of ``pool`` edges.

    ``reach`` is the product of the head's probabilities along a path: with ``head=edge`` its estimate of the chance
    that the target comes there. ``cost = 1 + node_cost + depth_cost * depth``. Nodes below ``threshold`` are left out.
    Neither ``reach`` nor ``1 / cost`` rises along a path, so whatever is kept has its ancestors kept. With a flat cost
    and a pool that is large enough this is ``BestFirstTree``.

    From notes on the paper; the numbers and the form of the cost are RECONSTRUCTED there already. The pool is shared
    out evenly over depths (ours). Drafts are chosen without chance; equality with the target's own tokens judges them.

    Raises:
        ValueError: a number is out of its range.
    """

    name = "reach_tree"
    drawn = "delta"
    trees = True

    def __init__(
        self,
        *,
        budget: int | None = 64,  # nodes besides the root at most; null: one per slot
        branch: int = 8,  # likeliest children of a node that are looked at
        pool: int = 256,  # edges that are looked at in all
        node_cost: float | int = 0.0,  # what a node costs beside 1
        depth_cost: float | int = 0.0,  # what it costs more per depth
        threshold: float | int = 0.0,  # least reach per cost of a node that is judged; 0 fills the budget
    ) -> None:
        check_budget(budget)
        for key, value in (("branch", branch), ("pool", pool)):
            if value < 1:
                raise SettingError(f"decoding.builder.{key}", f"{value} leaves no draft", "Use 1 or more")
        for key, number in (("node_cost", node_cost), ("depth_cost", depth_cost), ("threshold", threshold)):
            if not 0.0 <= number < math.inf:
                raise SettingError(f"decoding.builder.{key}", f"{number} is not 0 or more", "Use 0 to leave it out")
        self.budget = budget
        self.branch = branch
        self.pool = pool
        self.node_cost = float(node_cost)
        self.depth_cost = float(depth_cost)
        self.threshold = float(threshold)

    def num_nodes(self, num_drafts: int) -> int:
        return num_drafts if self.budget is None else self.budget

    def build(self, roots: Int[Tensor, " B"], scores: Scores, where: Round, sampler: Sampler) -> Draft:
        num_drafts = scores.logits.shape[1]
        width = max(1, self.pool // (self.branch * num_drafts))
        pool = grow(roots, scores, widths=[width] * num_drafts, branch=self.branch, keep_all=True, bonus=self._bonus)
        if self.threshold:
            enough = pool.values >= math.log(self.threshold)
            pool = replace(pool, values=torch.where(enough, pool.values, -torch.inf))
        draft = tree_of_pool(roots, pool, self.num_nodes(num_drafts), scores.signals)
        if not self.threshold:
            return draft
        assert draft.live is not None
        return draft.narrow(int(draft.live.sum(1).max()))

    def _bonus(self, depth: int) -> float:
        return -math.log(1.0 + self.node_cost + self.depth_cost * depth)
