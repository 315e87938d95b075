"""Trees of likely tokens, best path first."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from dflash_lightning.decoding.builder.base import DraftBuilder
from dflash_lightning.decoding.builder.draft_law import token_ids
from dflash_lightning.decoding.builder.shape import best_first
from dflash_lightning.decoding.law import highest
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Round, Scores


class BestFirstTree(DraftBuilder):
    """The ``budget`` likeliest paths under the product of the slots' laws, as a tree (DDTree, arXiv 2604.12989).

    ``budget`` counts nodes besides the root; null means one per slot, as a chain has. Laws are softmaxes at temperature
    1 whatever the target samples with: a colder law would leave nothing of the tree but its best chain. Over a reduced
    vocabulary they are normalised over that vocabulary.

    Raises:
        ValueError: ``budget`` is below 1.
    """

    name = "best_first_tree"
    drawn = "delta"
    trees = True

    def __init__(self, *, budget: int | None = None) -> None:
        if budget is not None and budget < 1:
            raise ValueError(
                f"decoding.builder.budget: {budget} leaves no draft. Use 1 or more, or null for a chain's."
            )
        self.budget = budget

    def num_nodes(self, num_drafts: int) -> int:
        return num_drafts if self.budget is None else self.budget

    def build(self, roots: Int[Tensor, " B"], scores: Scores, where: Round, sampler: Sampler) -> Draft:
        budget = self.num_nodes(scores.logits.shape[1])
        logits = scores.logits.float()
        values, places = highest(logits, min(budget, logits.shape[-1]))
        shape = best_first(values - logits.logsumexp(-1, keepdim=True), budget)
        drafts = shape.fill(token_ids(places, scores.ids))
        tokens = torch.cat([roots[:, None], drafts], dim=1)
        return Draft(tokens, self.drawn, parents=shape.parents, live=shape.live)
