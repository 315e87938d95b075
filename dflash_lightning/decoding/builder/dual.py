"""A second drafter behind the likeliest failures of the first (D2SD, arXiv 2606.04446)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.decoding.builder.base import DraftBuilder
from dflash_lightning.decoding.builder.chain import best_tokens
from dflash_lightning.decoding.builder.steps import follow
from dflash_lightning.decoding.builder.trie import join_chains
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Round, Scores
from dflash_lightning.errors import SettingError


class DualTree(DraftBuilder):
    """The first drafter's chain, and behind its ``cuts`` likeliest places of failure what the second makes of it.

    With ``c_k`` the first drafter's chance of its own ``k``-th token, it fails right after ``i`` drafts with chance
    ``c_1 .. c_i (1 - c_(i+1))``. For each of the likeliest ``i`` the second drafter is told the first ``i`` drafts and
    drafts the rest; all of its blocks are run at once. The chains are joined into one tree.

    Above temperature 0 the tree is judged by equality with the target's own token. Laws are softmaxes at temperature 1.
    """

    name = "dual_tree"
    drawn = "delta"
    trees = True

    def __init__(
        self,
        *,
        second: str | None = None,  # a run folder, a checkpoint or a folder of the second drafter, of the same target
        cuts: int = 4,  # places behind which the second drafter drafts
    ) -> None:
        if cuts < 1:
            raise SettingError("decoding.builder.cuts", f"{cuts} asks the second drafter nothing", "Use 1 or more (4)")
        self.second = second
        self.cuts = cuts
        self.lanes = cuts

    def num_nodes(self, num_drafts: int) -> int:
        return num_drafts + sum(max(0, num_drafts - cut) for cut in range(self.cuts))

    def build(self, roots: Int[Tensor, " B"], scores: Scores, where: Round, sampler: Sampler) -> Draft:
        assert scores.redraft is not None, "the decoder brings the second drafter along"
        chain, chances = best_chain(roots, scores)
        cuts = likeliest_failures(chances, self.cuts)
        told = chain[:, None].expand(-1, self.cuts, -1)
        again = scores.redraft(told, cuts)
        lanes, _ = best_chain(roots.repeat_interleave(self.cuts), again, told.flatten(0, 1), cuts.flatten())
        draft = join_chains(roots, torch.cat([chain[:, None], lanes.unflatten(0, cuts.shape)], dim=1))
        draft.signals = scores.signals
        return draft


def failures(chances: Float[Tensor, "B D"]) -> Float[Tensor, "B D"]:
    """The chance that a chain fails right after ``i`` drafts, where its drafts stand with ``chances``."""
    reached = torch.nn.functional.pad(chances[:, :-1].cumprod(1), (1, 0), value=1.0)
    return reached * (1.0 - chances)


def likeliest_failures(chances: Float[Tensor, "B D"], count: int) -> Int[Tensor, "B {count}"]:
    """The ``count`` likeliest places, best first and earlier ones first among equals; repeated if there are fewer."""
    order = failures(chances).argsort(dim=1, descending=True, stable=True)[:, :count]
    return torch.nn.functional.pad(order, (0, count - order.shape[1]), mode="constant", value=0)


def best_chain(
    roots: Int[Tensor, " B"],
    scores: Scores,
    told: Int[Tensor, "B D"] | None = None,
    known: Int[Tensor, " B"] | None = None,
) -> tuple[Int[Tensor, "B D"], Float[Tensor, "B D"]]:
    """The chain of likeliest tokens and their chances; the first ``known`` tokens of each row are those it is told."""
    chances: list[Tensor] = []

    def choose(step: Scores, depth: int) -> Int[Tensor, "B n"]:
        chances.append(step.logits.float().softmax(-1).amax(-1))
        best = best_tokens(step)
        if told is None or known is None:
            return best
        places = depth + torch.arange(best.shape[1], device=best.device)
        return torch.where(places < known[:, None], told[:, depth : depth + best.shape[1]], best)

    chain = choose(scores, 0) if scores.step is None else follow(roots, scores, choose)[0]
    return chain, torch.cat(chances, dim=1)
