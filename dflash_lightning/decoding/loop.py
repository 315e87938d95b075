"""The decoding loop: propose, build, cut, verify, commit, repeat.

It knows no method: chains, trees and plain decoding, greedy and sampled, differ in the parts it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from dflash_lightning.decoding.cut import cut_draft
from dflash_lightning.decoding.outcome import RowOutcome, read_outcomes
from dflash_lightning.decoding.pace import Pace
from dflash_lightning.decoding.parts import DecodeParts
from dflash_lightning.decoding.stats import DecodeStats, StageClock
from dflash_lightning.decoding.types import Draft, Generation, Round
from dflash_lightning.decoding.verifier import MatchVerifier
from dflash_lightning.device import abilities, send, send_list

# Called with (request id, new tokens, whether each was drafted) for the first token and after every round.
OnRound = Callable[[int, list[int], list[bool]], None]

_PLAIN = MatchVerifier()  # of a round without drafts: the target's own draw, whatever judges drafts


def clip(tokens: list[int], room: int, stop_ids: Collection[int]) -> list[int]:
    """``tokens`` up to and including the first stop token, and at most ``room`` of them."""
    tokens = tokens[:room]
    ends = [i for i, token in enumerate(tokens) if token in stop_ids]
    return tokens[: ends[0] + 1] if ends else tokens


@torch.no_grad()
def decode_batch(
    parts: DecodeParts,
    prompts: Sequence[list[int]],
    requests: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    stats: DecodeStats,
    on_round: OnRound | None = None,
    pace: Pace | None = None,
) -> list[Generation]:
    """Decode ``prompts`` together until each has stopped; ended rows ride along, committing nothing.

    ``pace`` says which rounds draft, and times them; null: all do.
    """
    book = _Book([Generation(request, [], [], []) for request in requests], max_new_tokens, stop_ids, on_round)
    clock = StageClock(stats)
    logits, features, lengths = parts.target.prefill(list(prompts))
    ids = send_list(list(requests), lengths.device)
    roots = parts.sampler.choose(logits[:, None], ids, lengths[:, None])[:, 0]
    book.first(roots.tolist())
    parts.proposer.start(features, lengths, roots)
    if parts.policy is not None:
        parts.policy.start(Round(ids, lengths, 0))
    clock.ends("prefill")

    index = 0
    while any(book.live):
        where, begin = Round(ids, lengths, index), clock.last[0]
        narrowed = [False] * len(prompts)
        drafting = pace is None or pace.drafts()
        if drafting:
            scores = parts.proposer.propose(roots, where)
            draft = parts.builder.build(roots, scores, where, parts.sampler)
            if draft.parents is not None and abilities(roots.device).queues:
                draft.height = parts.proposer.num_drafts
            if parts.policy is not None:
                draft.signals = {**scores.signals, **draft.signals}
                draft, narrowed = cut_draft(draft, parts.policy, where, book.live)
        else:
            draft = Draft(roots[:, None], "delta")
        clock.ends("draft")
        logits = parts.target.verify(draft.tokens, parents=draft.parents, live=draft.live)
        verifier = parts.verifier if drafting else _PLAIN
        verdict = verifier.verify(draft, logits, where, parts.sampler)
        roots = verdict.following
        outcomes = read_outcomes(draft, verdict)  # the one wait for the device per round
        clock.ends("verify")
        keep = torch.tensor([len(row.tokens) * live for row, live in zip(outcomes, book.live, strict=True)])
        if verdict.path is None:
            rejected = [row.rejected * live for row, live in zip(outcomes, book.live, strict=True)]
            verdict.rejected = send_list(rejected, lengths.device)
        kept = send(keep, lengths.device)
        features = parts.target.commit(verdict.path, keep).with_next(kept, roots)
        lengths = lengths + kept
        if drafting:
            parts.proposer.ingest(features, kept, verdict)
            if parts.policy is not None:
                parts.policy.observe(draft, verdict, logits)
        else:
            parts.proposer.skip(features, kept)
        clock.ends("commit")
        if pace is not None:
            pace.observe(tokens=sum(keep.tolist()) / sum(book.live), seconds=clock.last[0] - begin)
        book.enter(outcomes, narrowed if drafting else None, stats)
        clock.ends("host")
        stats.cycles += 1
        stats.compiled_cycles += parts.proposer.compiled
        index += 1
    clock.stop()
    for generation in book.generations:
        stats.add_request(generation)
    return book.generations


class _Book:
    """The answers so far: cuts them at stop tokens and lengths, counts, and tells the listener."""

    def __init__(
        self,
        generations: list[Generation],
        max_new_tokens: int,
        stop_ids: Collection[int],
        on_round: OnRound | None,
    ) -> None:
        self.generations = generations
        self.max_new_tokens = max_new_tokens
        self.stop_ids = frozenset(stop_ids)
        self.on_round = on_round

    @property
    def live(self) -> list[bool]:
        return [generation.finish is None for generation in self.generations]

    def first(self, tokens: list[int]) -> None:
        """The token after the prompt, which no round has drafted."""
        for generation, token in zip(self.generations, tokens, strict=True):
            self._append(generation, [token], drafted=0)

    def enter(self, outcomes: list[RowOutcome], narrowed: list[bool] | None, stats: DecodeStats) -> None:
        """The outcome of a round, for the rows that had not ended before it; ``narrowed`` null: nothing was drafted."""
        for i, (generation, row) in enumerate(zip(self.generations, outcomes, strict=True)):
            if generation.finish is not None:
                continue
            accepted = len(row.tokens) - 1
            count = self._append(generation, row.tokens, drafted=accepted)
            generation.committed.append(count)
            generation.accepted.append(accepted)
            generation.offered.append(row.offered)
            if narrowed is None:
                stats.add_plain_round(count)
            else:
                cut = narrowed[i]
                stats.add_round(depth=row.offered, nodes=row.nodes, accepted=accepted, committed=count, narrowed=cut)

    def _append(self, generation: Generation, tokens: list[int], *, drafted: int) -> int:
        """Add what still belongs to the answer; returns how many tokens that is."""
        tokens = clip(tokens, self.max_new_tokens - len(generation.output_ids), self.stop_ids)
        generation.output_ids += tokens
        if tokens[-1] in self.stop_ids:
            generation.finish = "stop"
        elif len(generation.output_ids) == self.max_new_tokens:
            generation.finish = "length"
        if self.on_round is not None:
            self.on_round(generation.request, tokens, [i < drafted for i in range(len(tokens))])
        return len(tokens)
