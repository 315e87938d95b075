"""Verifiers: which drafts stand. Whatever they are given, the output is distributed as the target's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.decoding.law import Law
from dflash_lightning.decoding.noise import Noise, Stream
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Drawn, Round, Verdict


class Verifier(ABC):
    """Judges a draft by the target's logits at its nodes (row ``k`` of ``logits`` follows node ``k``).

    ``drawn`` lists the kinds of drafts for which the verdict is lossless.
    """

    drawn: ClassVar[frozenset[Drawn]]

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    @abstractmethod
    def verify(self, draft: Draft, logits: Float[Tensor, "B N V"], where: Round) -> Verdict:
        """The verdict for each row; rows that have ended get one too."""


class MatchVerifier(Verifier):
    """Commits drafts while each equals the target's own token, then the target's next one.

    The target's token at a position is drawn with noise that belongs to the position, so the output is what plain
    decoding gives, token for token, whatever the drafter does. At temperature 0 this is the longest greedy match.
    """

    drawn = frozenset({"delta", "sampled"})

    def verify(self, draft: Draft, logits: Float[Tensor, "B N V"], where: Round) -> Verdict:
        nodes = torch.arange(1, draft.tokens.shape[1] + 1, device=draft.tokens.device)
        own = self.sampler.choose(logits, where.requests, where.positions[:, None] + nodes)
        accepted = _leading(draft.tokens[:, 1:] == own[:, :-1])
        return Verdict(accepted, own.gather(1, accepted[:, None])[:, 0])


class TokenVerifier(Verifier):
    """Accepts each sampled draft with probability ``min(1, p/q)``; after a rejection draws from what p has over q.

    Speculative sampling (Leviathan et al. 2211.17192, Chen et al. 2302.01318). Lossless only if ``draft.law`` is the
    law that the drafts were truly drawn from: verifying argmax drafts this way gives text the target would not write.
    """

    drawn = frozenset({"sampled"})

    def verify(self, draft: Draft, logits: Float[Tensor, "B N V"], where: Round) -> Verdict:
        assert draft.law is not None, "token verification needs the law of the drafts"
        target = self.sampler.law(logits)
        width = draft.law.shape[1]
        acceptance = acceptance_probability(
            _rows(target, (slice(None), slice(None, width))), draft.law, draft.tokens[:, 1:]
        )
        slots = torch.arange(width, device=acceptance.device)[None]
        uniform = self.sampler.noise.uniform(Stream.ACCEPT, where.requests, Noise.at(where.index, slots))
        accepted = _leading(uniform < acceptance)
        each = torch.arange(len(accepted), device=accepted.device)
        law = residual(
            _rows(target, (each, accepted)),
            draft.law[each, accepted.clamp_max(width - 1)] * (accepted < width)[:, None],
        )
        at = Noise.at(where.index, where.positions.new_zeros(1, 1))
        following = self.sampler.draw(_rows(law, (slice(None), None)), Stream.RESIDUAL, where.requests, at)[:, 0]
        return Verdict(accepted, following, acceptance, law)


def acceptance_probability(
    target: Law, law: Float[Tensor, "B D V"], drafts: Int[Tensor, "B D"]
) -> Float[Tensor, "B D"]:
    """``min(1, p/q)`` of each draft, given that the drafts before it stand."""
    return (target.of(drafts) / law.gather(-1, drafts[..., None])[..., 0]).clamp_max(1.0)


def residual(target: Law, law: Float[Tensor, "B V"]) -> Law:
    """Law of the token after a rejection: ``max(p - q, 0)``, normalised; ``p`` itself where nothing is left of it.

    A row of zeros for ``law`` says that nothing was rejected, and leaves ``p`` as it is.
    """
    rest = (target.mass - (law if target.ids is None else law.gather(-1, target.ids))).clamp_min(0.0)
    mass = rest.sum(-1, keepdim=True)
    return Law(torch.where(mass > 0.0, rest / mass, target.mass), target.ids)


def _leading(stands: Tensor) -> Tensor:
    """How many entries of each row are true before the first false one."""
    return stands.long().cumprod(1).sum(1)


def _rows(law: Law, index: tuple[slice | Tensor | None, ...]) -> Law:
    """Some rows of a law."""
    return Law(law.mass[index], None if law.ids is None else law.ids[index])
