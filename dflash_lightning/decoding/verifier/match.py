"""Verification by equality with the target's own tokens."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Round, Verdict
from dflash_lightning.decoding.verifier.base import Verifier


class MatchVerifier(Verifier):
    """Commits drafts while each equals the target's own token, then the target's next one.

    The target's token at a position is drawn with noise that belongs to the position, so the output is what plain
    decoding gives, token for token, whatever the drafter does. At temperature 0 this is the longest greedy match.
    """

    name = "match"
    judges = frozenset({"delta", "noise", "sampled"})
    repeatable = True

    def verify(self, draft: Draft, logits: Float[Tensor, "B N V"], where: Round, sampler: Sampler) -> Verdict:
        nodes = torch.arange(1, draft.tokens.shape[1] + 1, device=draft.tokens.device)
        own = sampler.choose(logits, where.requests, where.positions[:, None] + nodes)
        accepted = leading(draft.tokens[:, 1:] == own[:, :-1])
        return Verdict(accepted, own.gather(1, accepted[:, None])[:, 0])


def leading(stands: Bool[Tensor, "B D"]) -> Int[Tensor, " B"]:
    """How many entries of each row are true before the first false one."""
    return stands.long().cumprod(1).sum(1)
