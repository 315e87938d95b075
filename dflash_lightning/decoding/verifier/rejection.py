"""Verification of sampled drafts by rejection: the output is distributed as the target's, draw by draw."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.decoding.law import Law
from dflash_lightning.decoding.noise import Noise, Stream
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Round, Verdict
from dflash_lightning.decoding.verifier.base import Verifier
from dflash_lightning.decoding.verifier.match import leading


class TokenVerifier(Verifier):
    """Accepts each sampled draft with probability ``min(1, p/q)``; after a rejection draws from what p has over q.

    Speculative sampling (Leviathan et al. 2211.17192, Chen et al. 2302.01318). Lossless only if ``draft.law`` is the
    law that the drafts were truly drawn from: verifying argmax drafts this way gives text the target would not write.
    """

    name = "token"
    judges = frozenset({"sampled"})

    def verify(self, draft: Draft, logits: Float[Tensor, "B N V"], where: Round, sampler: Sampler) -> Verdict:
        assert draft.law is not None, "token verification needs the law of the drafts"
        target = sampler.law(logits)
        width = draft.law.mass.shape[1]
        acceptance = acceptance_probability(
            _rows(target, (slice(None), slice(None, width))), draft.law, draft.tokens[:, 1:]
        )
        slots = torch.arange(width, device=acceptance.device)[None]
        uniform = sampler.noise.uniform(Stream.ACCEPT, where.requests, Noise.at(where.index, slots))
        accepted = leading(uniform < acceptance)
        each = torch.arange(len(accepted), device=accepted.device)
        law = residual(
            _rows(target, (each, accepted)),
            _rows(draft.law, (each, accepted.clamp_max(width - 1))).dense(logits.shape[-1])
            * (accepted < width)[:, None],
        )
        at = Noise.at(where.index, where.positions.new_zeros(1, 1))
        following = sampler.draw(_rows(law, (slice(None), None)), Stream.RESIDUAL, where.requests, at)[:, 0]
        return Verdict(accepted, following, acceptance=acceptance, law=law)


def acceptance_probability(target: Law, law: Law, drafts: Int[Tensor, "B D"]) -> Float[Tensor, "B D"]:
    """``min(1, p/q)`` of each draft, given that the drafts before it stand."""
    return (target.of(drafts) / law.of(drafts)).clamp_max(1.0)


def residual(target: Law, law: Float[Tensor, "B V"]) -> Law:
    """Law of the token after a rejection: ``max(p - q, 0)``, normalised; ``p`` itself where nothing is left of it.

    A row of zeros for ``law`` says that nothing was rejected, and leaves ``p`` as it is.
    """
    rest = (target.mass - (law if target.ids is None else law.gather(-1, target.ids))).clamp_min(0.0)
    mass = rest.sum(-1, keepdim=True)
    return Law(torch.where(mass > 0.0, rest / mass, target.mass), target.ids)


def _rows(law: Law, index: tuple[slice | Tensor | None, ...]) -> Law:
    """Some rows of a law."""
    return Law(law.mass[index], None if law.ids is None else law.ids[index])
