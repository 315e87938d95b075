"""Verification by equality with the target's own tokens."""

from __future__ import annotations

from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from dflash_lightning.decoding.paths import along_paths, leading, tree_verdict
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Round, Verdict
from dflash_lightning.decoding.verifier.base import Verifier


class MatchVerifier(Verifier):
    """Accepts drafts while each equals the target's own token, then commits the target's next token.

    The target's token at a position is drawn with noise that belongs to the position. So the output equals that of
    plain decoding, token for token, whatever the drafts are. At temperature 0 this is the longest greedy match. In a
    tree, the target's own token after a node decides which child is visited next. Nodes of one depth share their noise
    and siblings hold different tokens, so at most one path is accepted.
    """

    name = "match"
    judges = frozenset({"delta", "noise", "sampled"})
    trees = True
    repeatable = True

    def verify(self, draft: Draft, logits: Float[Tensor, "B N V"], where: Round, sampler: Sampler) -> Verdict:
        own = sampler.choose(logits, where.requests, where.positions[:, None] + draft.depth + 1)
        if draft.parents is None:
            stands = draft.tokens[:, 1:] == own[:, :-1]
            accepted = leading(stands if draft.live is None else stands & draft.live[:, 1:])
            return Verdict(accepted, own.gather(1, accepted[:, None])[:, 0])
        stands = draft.tokens == own.gather(1, draft.parents)
        if draft.live is not None:
            stands = stands & draft.live
        stands[:, 0] = True
        verdict = tree_verdict(draft, along_paths(stands, draft.parents))
        return replace(verdict, following=own.gather(1, verdict.following[:, None])[:, 0])

    def stands(
        self, target: Float[Tensor, "*slots"], drafted: Float[Tensor, "*slots"]
    ) -> Float[Tensor, "*slots"] | None:
        return drafted
