"""Builders: from a proposer's scores to the tokens that the target judges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from dflash_lightning.decoding.law import Law, first_argmax
from dflash_lightning.decoding.noise import Noise, Stream
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Drawn, Round, Scores


class DraftBuilder(ABC):
    """Arranges drafts under a root, and says how they were chosen."""

    drawn: ClassVar[Drawn]

    @abstractmethod
    def build(self, roots: Int[Tensor, " B"], scores: Scores, where: Round) -> Draft:
        """The draft of each row."""


class BestChain(DraftBuilder):
    """A chain of the proposer's argmax tokens."""

    drawn = "delta"

    def build(self, roots: Int[Tensor, " B"], scores: Scores, where: Round) -> Draft:
        best = first_argmax(scores.logits)
        drafts = best if scores.ids is None else scores.ids[best]
        return Draft(torch.cat([roots[:, None], drafts], dim=1), self.drawn)


class SampledChain(DraftBuilder):
    """A chain of tokens drawn slot by slot from the proposer's laws, warped as the target's are."""

    drawn = "sampled"

    def __init__(self, sampler: Sampler, vocab_size: int) -> None:
        self.sampler = sampler
        self.vocab_size = vocab_size

    def build(self, roots: Int[Tensor, " B"], scores: Scores, where: Round) -> Draft:
        law = self.sampler.law(scores.logits)
        if scores.ids is not None:
            law = Law(law.mass, scores.ids.expand(law.mass.shape) if law.ids is None else scores.ids[law.ids])
        slots = torch.arange(scores.logits.shape[1], device=roots.device)[None]
        drafts = self.sampler.draw(law, Stream.DRAFT, where.requests, Noise.at(where.index, slots))
        return Draft(torch.cat([roots[:, None], drafts], dim=1), self.drawn, law.dense(self.vocab_size))
