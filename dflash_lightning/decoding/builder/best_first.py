"""Trees of likely tokens, best path first."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor, nn

from dflash_lightning.decoding.builder.base import DraftBuilder
from dflash_lightning.decoding.builder.draft_law import token_ids
from dflash_lightning.decoding.builder.grow import Pool, grow
from dflash_lightning.decoding.builder.shape import best_first
from dflash_lightning.decoding.law import highest
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Round, Scores
from dflash_lightning.errors import SettingError


class BestFirstTree(DraftBuilder):
    """The ``budget`` likeliest paths under the product of the slots' laws, as a tree (DDTree, arXiv 2604.12989).

    ``budget`` counts nodes besides the root; null means one per slot, as a chain has. Laws are softmaxes at temperature
    1 whatever the target samples with: a colder law would leave nothing of the tree but its best chain. Over a reduced
    vocabulary they are normalised over that vocabulary. Where laws depend on the tokens drafted before, a path's
    probability is the product along it (DominoTree, arXiv 2607.08642, in its form of one call per depth): ``budget``
    lanes per depth are enough for the best ``budget`` nodes of all.

    Raises:
        ValueError: ``budget`` is below 1.
    """

    name = "best_first_tree"
    drawn = "delta"
    trees = True

    def __init__(self, *, budget: int | None = None) -> None:
        if budget is not None and budget < 1:
            raise SettingError(
                "decoding.builder.budget", f"{budget} leaves no draft", "Use 1 or more, or null for a chain's"
            )
        self.budget = budget

    def num_nodes(self, num_drafts: int) -> int:
        return num_drafts if self.budget is None else self.budget

    def build(self, roots: Int[Tensor, " B"], scores: Scores, where: Round, sampler: Sampler) -> Draft:
        num_drafts = scores.logits.shape[1]
        budget = self.num_nodes(num_drafts)
        if scores.step is not None:
            pool = grow(roots, scores, widths=[budget] * num_drafts, branch=budget)
            return tree_of_pool(roots, pool, budget, scores.signals)
        logits = scores.logits.float()
        values, places = highest(logits, min(budget, logits.shape[-1]))
        shape = best_first(values - logits.logsumexp(-1, keepdim=True), budget)
        tokens = torch.cat([roots[:, None], shape.fill(token_ids(places, scores.ids))], dim=1)
        return Draft(tokens, self.drawn, parents=shape.parents, live=shape.live, signals=scores.signals)


def tree_of_pool(roots: Int[Tensor, " B"], pool: Pool, budget: int, signals: dict[str, Tensor]) -> Draft:
    """The tree of the ``budget`` best candidates, filled up with dead nodes under the root.

    ``signals`` [B D] or [B] are handed on.
    """
    tokens, parents, live = pool.best(budget)
    missing = (0, budget - tokens.shape[1])
    return Draft(
        torch.cat([roots[:, None], nn.functional.pad(tokens, missing)], dim=1),
        "delta",
        parents=nn.functional.pad(parents, (1, missing[1])),
        live=torch.cat([torch.ones_like(live[:, :1]), nn.functional.pad(live, missing)], dim=1),
        signals=signals,
    )
