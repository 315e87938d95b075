"""The decoding loop: propose, verify, commit, repeat.

It knows no method: greedy and sampled chains and plain decoding differ in the parts it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.decoding.builder import DraftBuilder
from dflash_lightning.decoding.proposer import Proposer
from dflash_lightning.decoding.stats import DecodeStats, StageClock
from dflash_lightning.decoding.types import Draft, Generation, Round, Verdict
from dflash_lightning.decoding.verify import Verifier
from dflash_lightning.types import TargetFeatures

# Called with (request id, new tokens, whether each was drafted) for the first token and after every round.
OnRound = Callable[[int, list[int], list[bool]], None]


@runtime_checkable
class CachedTarget(Protocol):
    """What the loop asks of a target: ``TargetAdapter`` is one.

    ``prefill`` returns the logits after each prompt, the features of its positions and the prompts' lengths. ``verify``
    runs roots and drafts at the positions after what is committed and returns logits and features of each; ``commit``
    keeps the first ``keep[b]`` of these and takes the rest back.
    """

    def prefill(self, prompts: list[list[int]]) -> tuple[Float[Tensor, "B V"], TargetFeatures, Int[Tensor, " B"]]: ...

    def verify(self, tokens: Int[Tensor, "B W"]) -> tuple[Float[Tensor, "B W V"], TargetFeatures]: ...

    def commit(self, keep: Int[Tensor, " B"]) -> None: ...


@dataclass(frozen=True)
class DecodeParts:
    """What the loop runs."""

    target: CachedTarget
    proposer: Proposer
    builder: DraftBuilder
    verifier: Verifier


def check_compatible(parts: DecodeParts) -> None:
    """Refuse parts that would decode something else than the target's own text.

    Raises:
        ValueError: the drafts are not of a kind that the verifier judges losslessly.
    """
    drawn, judged = parts.builder.drawn, parts.verifier.drawn
    if parts.proposer.num_drafts and drawn not in judged:
        raise ValueError(
            f"decoding.verifier: {type(parts.verifier).__name__} judges {sorted(judged)} drafts, but "
            f"{type(parts.builder).__name__} makes {drawn!r} ones, for which its output would not be distributed as "
            "the target's. Use the match verifier for drafts chosen without chance, or a builder that samples."
        )


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
) -> list[Generation]:
    """Decode ``prompts`` together until each has stopped; ended rows ride along, committing nothing."""
    book = _Book([Generation(request, [], [], []) for request in requests], max_new_tokens, stop_ids, on_round)
    clock = StageClock(stats)
    logits, features, lengths = parts.target.prefill(list(prompts))
    ids = torch.tensor(list(requests), device=lengths.device)
    roots = parts.verifier.sampler.choose(logits[:, None], ids, lengths[:, None])[:, 0]
    book.first(roots.tolist())
    parts.proposer.start(features, lengths, roots)
    clock.ends("prefill")

    index = 0
    while any(book.live):
        where = Round(ids, lengths, index)
        draft = parts.builder.build(roots, parts.proposer.propose(roots), where)
        clock.ends("draft")
        logits, features = parts.target.verify(draft.tokens)
        verdict = parts.verifier.verify(draft, logits, where)
        roots = verdict.following
        committed = _on_host(draft, verdict)  # the one wait for the device per round
        clock.ends("verify")
        keep = torch.tensor([len(tokens) * live for tokens, live in zip(committed, book.live, strict=True)])
        parts.target.commit(keep)
        parts.proposer.ingest(features.with_next(keep, roots), keep)
        lengths = lengths + keep.to(lengths.device)
        clock.ends("commit")
        book.enter(committed, draft.tokens.shape[1] - 1, stats)
        clock.ends("host")
        stats.cycles += 1
        stats.compiled_cycles += parts.proposer.compiled
        index += 1
    clock.stop()
    for generation in book.generations:
        stats.add_request(generation)
    return book.generations


def _on_host(draft: Draft, verdict: Verdict) -> list[list[int]]:
    """Accepted drafts and the token after them, per row."""
    columns = torch.cat([verdict.accepted[:, None], verdict.following[:, None], draft.tokens[:, 1:]], dim=1)
    return [[*row[2 : 2 + row[0]], row[1]] for row in columns.tolist()]


class _Book:
    """Who has been given which tokens: cuts at stop tokens and lengths, counts, tells the listener."""

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
            self._give(generation, [token], drafted=0)

    def enter(self, committed: list[list[int]], width: int, stats: DecodeStats) -> None:
        """The outcome of a round, for the rows that had not ended before it."""
        for generation, tokens in zip(self.generations, committed, strict=True):
            if generation.finish is not None:
                continue
            accepted = len(tokens) - 1
            count = self._give(generation, tokens, drafted=accepted)
            generation.committed.append(count)
            generation.accepted.append(accepted)
            stats.add_round(width=width, accepted=accepted, committed=count)

    def _give(self, generation: Generation, tokens: list[int], *, drafted: int) -> int:
        tokens = clip(tokens, self.max_new_tokens - len(generation.output_ids), self.stop_ids)
        generation.output_ids += tokens
        if tokens[-1] in self.stop_ids:
            generation.finish = "stop"
        elif len(generation.output_ids) == self.max_new_tokens:
            generation.finish = "length"
        if self.on_round is not None:
            self.on_round(generation.request, tokens, [i < drafted for i in range(len(tokens))])
        return len(tokens)
