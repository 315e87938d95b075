"""Trees of likely tokens, best path first."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.decoding.builder.base import DraftBuilder
from dflash_lightning.decoding.builder.grow import Pool, grow
from dflash_lightning.decoding.builder.shape import best_first
from dflash_lightning.decoding.law import highest
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Round, Scores
from dflash_lightning.errors import SettingError
from dflash_lightning.types import token_ids


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
        check_budget(budget)
        self.budget = budget

    def num_nodes(self, num_drafts: int) -> int:
        return num_drafts if self.budget is None else self.budget

    def build(self, roots: Int[Tensor, " B"], scores: Scores, where: Round, sampler: Sampler) -> Draft:
        return best_tree(roots, scores, self.num_nodes(scores.logits.shape[1]))[0]


def check_budget(budget: int | None) -> None:
    """Refuse a number of nodes that leaves no tree.

    Raises:
        ValueError: it is below 1.
    """
    if budget is not None and budget < 1:
        raise SettingError(
            "decoding.builder.budget", f"{budget} leaves no draft", "Use 1 or more, or null for a chain's"
        )


def best_tree(
    roots: Int[Tensor, " B"], scores: Scores, budget: int, branch: int | None = None
) -> tuple[Draft, Float[Tensor, "B budget"]]:
    """The tree of the ``budget`` likeliest paths, and the probability of each; dead nodes have 0.

    Nodes stand best first, so that the first ``n`` of them are the best tree of ``n``. Only the ``branch`` likeliest
    tokens of a slot are looked at; null: as many as there are nodes, which leaves nothing out.
    """
    num_drafts = scores.logits.shape[1]
    branch = budget if branch is None else min(branch, budget)
    if scores.step is not None:
        pool = grow(roots, scores, widths=[budget] * num_drafts, branch=branch)
        return tree_of_pool(roots, pool, budget, scores.signals), pool.masses(budget)
    logits = scores.logits.float()
    values, places = highest(logits, min(branch, logits.shape[-1]))
    shape = best_first(values - logits.logsumexp(-1, keepdim=True), budget)
    tokens = torch.cat([roots[:, None], shape.fill(token_ids(places, scores.ids))], dim=1)
    return Draft(tokens, "delta", parents=shape.parents, live=shape.live, signals=scores.signals), shape.masses()


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
