"""What every round drafted and what became of it, for showing. The loop knows nothing of it and costs what it did."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

from dflash_lightning.decoding.decoder import SpeculativeDecoder
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Generation, Round, Verdict
from dflash_lightning.decoding.verifier import Verifier


@dataclass(frozen=True)
class RoundRecord:
    """One round of one answer, as token ids.

    ``accepted`` drafts stand in the answer, in this order; ``own`` is the target's token after them, empty where the
    answer was cut before it. ``rejected`` drafts do not stand. Of a chain they follow the accepted ones, the first in
    the place of ``own``; of a tree (``branched``) they are the nodes beside the path, parents before children.
    """

    accepted: list[int]
    own: list[int]
    rejected: list[int]
    branched: bool


class _Seen(NamedTuple):
    """What a round leaves behind of all its rows: no law and no logits, so it is small."""

    tokens: Int[Tensor, "B N"]
    live: Bool[Tensor, "B N"] | None
    accepted: Int[Tensor, " B"]
    following: Int[Tensor, " B"]
    path: Int[Tensor, "B P"] | None
    branched: bool

    def row(self, b: int, committed: int) -> RoundRecord:
        """The record of one row, of which ``committed`` tokens came into its answer."""
        tokens, count = self.tokens[b].tolist(), int(self.accepted[b])
        live = [True] * len(tokens) if self.live is None else self.live[b].tolist()
        path = list(range(count + 1)) if self.path is None else self.path[b, : count + 1].tolist()
        standing = [tokens[node] for node in path[1:]]
        return RoundRecord(
            accepted=standing[:committed],
            own=[int(self.following[b])] if committed > count else [],
            rejected=[token for node, token in enumerate(tokens) if live[node] and node not in set(path)],
            branched=self.branched,
        )


class Recorder(Verifier):
    """A decoder's verifier that remembers what it was shown and what it said; its verdicts are those of ``judge``."""

    judges = frozenset({"delta", "noise", "sampled"})
    trees = True

    def __init__(self, judge: Verifier) -> None:
        self.judge = judge
        self._seen: dict[int, list[tuple[_Seen, int]]] = defaultdict(list)

    @classmethod
    def listen(cls, decoder: SpeculativeDecoder) -> Recorder:
        """A recorder of all that ``decoder`` will decode. Each request may be decoded once."""
        recorder = cls(decoder.parts.verifier)
        decoder.parts = replace(decoder.parts, verifier=recorder)
        return recorder

    def verify(self, draft: Draft, logits: Float[Tensor, "B N V"], where: Round, sampler: Sampler) -> Verdict:
        verdict = self.judge.verify(draft, logits, where, sampler)
        branched = draft.parents is not None
        seen = _Seen(draft.tokens, draft.live, verdict.accepted, verdict.following, verdict.path, branched)
        for b, request in enumerate(where.requests.tolist()):
            self._seen[request].append((seen, b))
        return verdict

    def rounds(self, generation: Generation) -> list[RoundRecord]:
        """The rounds of an answer; what its row rode along for after its end is left out."""
        seen = self._seen[generation.request]
        return [entry.row(b, count) for (entry, b), count in zip(seen, generation.committed, strict=False)]
