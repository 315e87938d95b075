"""Chains: one token per slot, drawn all at once, or in turn where each law depends on the tokens before.

A head may offer to draw all slots at once although they depend on each other (``Scores.draw``): then it is asked to.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.decoding.builder.base import DraftBuilder
from dflash_lightning.decoding.builder.draft_law import draft_law
from dflash_lightning.decoding.builder.steps import follow
from dflash_lightning.decoding.law import Law, first_argmax, greedy_law
from dflash_lightning.decoding.noise import Noise, Stream
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Round, Scores
from dflash_lightning.types import token_ids


class BestChain(DraftBuilder):
    """A chain of the proposer's argmax tokens (DFlash, arXiv 2602.06036), each after the ones before it."""

    name = "best_chain"
    drawn = "delta"

    def build(self, roots: Int[Tensor, " B"], scores: Scores, where: Round, sampler: Sampler) -> Draft:
        if scores.draw is not None:
            drafts, signals = scores.draw(best_tokens)[0], scores.signals
        elif scores.step is None:
            drafts, signals = best_tokens(scores), scores.signals
        else:
            drafts, signals = follow(roots, scores, lambda step, depth: best_tokens(step))
        return Draft(torch.cat([roots[:, None], drafts], dim=1), self.drawn, signals=signals)

    def slot_law(
        self, logits: Float[Tensor, "B D v"], ids: Int[Tensor, "*slots v"] | None, sampler: Sampler
    ) -> Law | None:
        best = greedy_law(logits)
        assert best.ids is not None
        return Law(best.mass, token_ids(best.ids, ids))


class SampledChain(DraftBuilder):
    """A chain of tokens drawn slot by slot from the proposer's laws, warped as the target's are.

    Where a law depends on the tokens drafted before it, it is asked for after they are drawn: the laws that the
    verifier is told are those that the tokens were drawn from.
    """

    name = "sampled_chain"
    drawn = "sampled"

    def build(self, roots: Int[Tensor, " B"], scores: Scores, where: Round, sampler: Sampler) -> Draft:
        slots = torch.arange(scores.logits.shape[1], device=roots.device)[None]
        laws: list[Law] = []

        def draw(step: Scores, slots: Int[Tensor, "1 n"]) -> Int[Tensor, "B n"]:
            laws.append(draft_law(step.logits, step.ids, sampler))
            return sampler.draw(laws[-1], Stream.DRAFT, where.requests, Noise.at(where.index, slots))

        if scores.draw is not None:
            drafts, signals = scores.draw(lambda at: draw(at, slots))[0], scores.signals
            laws = laws[-1:]  # those of the drafts that are kept
        elif scores.step is None:
            drafts, signals = draw(scores, slots), scores.signals
        else:
            drafts, signals = follow(roots, scores, lambda step, depth: draw(step, slots[:, depth, None]))
        law = laws[0] if len(laws) == 1 else Law.joined(laws)
        return Draft(torch.cat([roots[:, None], drafts], dim=1), self.drawn, law=law, signals=signals)

    def slot_law(
        self, logits: Float[Tensor, "B D v"], ids: Int[Tensor, "*slots v"] | None, sampler: Sampler
    ) -> Law | None:
        return draft_law(logits, ids, sampler)


def best_tokens(scores: Scores) -> Int[Tensor, "B n"]:
    """The likeliest token of each law."""
    return token_ids(first_argmax(scores.logits)[..., None], scores.ids)[..., 0]
