"""Decodes prompts for real and keeps of every round what training needs of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from dflash_lightning.decoding.decoder import SpeculativeDecoder
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Generation, Round, Verdict
from dflash_lightning.decoding.verifier import Verifier
from dflash_lightning.types import DecodedRound


class Rollout(Verifier):
    """A decoder's verifier that also keeps the target's log-probabilities; its verdicts are those of ``judge``.

    Chains only. Nothing is computed a second time: the logits are those that the drafts were judged by.
    """

    judges = frozenset({"delta", "noise", "sampled"})

    def __init__(self, judge: Verifier) -> None:
        self.judge = judge
        self._seen: dict[int, list[tuple[list[int], int, list[float], float]]] = defaultdict(list)

    @classmethod
    def listen(cls, decoder: SpeculativeDecoder) -> Rollout:
        """One that keeps all that ``decoder`` will decode. Each request may be decoded once."""
        assert not decoder.parts.builder.trees, "rounds of chains are kept, not of trees"
        rollout = cls(decoder.parts.verifier)
        decoder.parts = replace(decoder.parts, verifier=rollout)
        return rollout

    def verify(self, draft: Draft, logits: Float[Tensor, "B N V"], where: Round, sampler: Sampler) -> Verdict:
        verdict = self.judge.verify(draft, logits, where, sampler)
        laws = logits.float().log_softmax(-1)
        drafts = draft.tokens[:, 1:]
        chances = laws[:, :-1].gather(-1, drafts[..., None])[..., 0]
        at = verdict.accepted[:, None, None].expand(-1, 1, laws.shape[-1])
        own = laws.gather(1, at)[:, 0].gather(-1, verdict.following[:, None])[:, 0]
        live = drafts.shape[1] if draft.live is None else None
        for b, request in enumerate(where.requests.tolist()):
            count = live if live is not None else int(draft.live[b, 1:].sum())  # type: ignore[index]
            kept = drafts[b, :count].tolist(), int(verdict.accepted[b]), chances[b, :count].tolist(), float(own[b])
            self._seen[request].append(kept)
        return verdict

    def rounds(self, generation: Generation, answer: Sequence[int]) -> tuple[DecodedRound, ...]:
        """The rounds of an answer as far as it is ``answer``, and as all their tokens belong to it."""
        same = 0
        for mine, theirs in zip(generation.output_ids, answer, strict=False):
            if mine != theirs:
                break
            same += 1
        rounds, anchor = [], 0
        for drafts, accepted, chances, own in self._seen[generation.request]:
            after = anchor + accepted + 1
            if after >= same:
                break
            rounds.append(DecodedRound(anchor, tuple(drafts), accepted, tuple(chances), own))
            anchor = after
        return tuple(rounds)
