"""Chains: one token per slot."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from dflash_lightning.decoding.builder.base import DraftBuilder
from dflash_lightning.decoding.law import Law, first_argmax
from dflash_lightning.decoding.noise import Noise, Stream
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Round, Scores


class BestChain(DraftBuilder):
    """A chain of the proposer's argmax tokens (DFlash, arXiv 2602.06036)."""

    name = "best_chain"
    drawn = "delta"

    def build(self, roots: Int[Tensor, " B"], scores: Scores, where: Round, sampler: Sampler) -> Draft:
        best = first_argmax(scores.logits)
        drafts = best if scores.ids is None else scores.ids[best]
        return Draft(torch.cat([roots[:, None], drafts], dim=1), self.drawn)


class SampledChain(DraftBuilder):
    """A chain of tokens drawn slot by slot from the proposer's laws, warped as the target's are."""

    name = "sampled_chain"
    drawn = "sampled"

    def build(self, roots: Int[Tensor, " B"], scores: Scores, where: Round, sampler: Sampler) -> Draft:
        law = sampler.law(scores.logits)
        if scores.ids is not None:
            law = Law(law.mass, scores.ids.expand(law.mass.shape) if law.ids is None else scores.ids[law.ids])
        slots = torch.arange(scores.logits.shape[1], device=roots.device)[None]
        drafts = sampler.draw(law, Stream.DRAFT, where.requests, Noise.at(where.index, slots))
        return Draft(torch.cat([roots[:, None], drafts], dim=1), self.drawn, law=law)
