"""Measures what a round costs on this machine: with the decoder's own models, buffers and batch."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dflash_lightning.decoding.cost.table import CostTable
from dflash_lightning.decoding.proposer import Proposer
from dflash_lightning.decoding.types import Round, Scores
from dflash_lightning.machine import machine
from dflash_lightning.ops.clock import now
from dflash_lightning.target import TargetAdapter

_SHORTEST, _STEP = 32, 1024  # the first context that is timed, and the distance of the others
_WARM_UPS = 2

# ``build(roots, scores, where)``: what the builder does with the scores of a round.
Build = Callable[[torch.Tensor, Scores, Round], object]


@dataclass
class RoundTimer:
    """Times the stages of rounds of ``batch_size`` texts of up to ``max_length`` tokens.

    Tokens are arbitrary: no time depends on them. The target's cache and the proposer's context hold them afterwards,
    and both forget them with the next batch. ``drafter`` tells this drafter from others of the target; ``shown`` says
    whether a line announces the measuring.
    """

    target: TargetAdapter
    proposer: Proposer
    batch_size: int
    max_length: int
    drafter: dict[str, Any] = field(default_factory=dict)
    shown: bool = False

    @property
    def place(self) -> dict[str, Any]:
        """What the seconds hold for; lengths up to the next power of two share them."""
        facts = self.target.facts
        return {
            "machine": machine(),
            "target": {"name": facts.name, "digest": facts.digest, "dtype": str(self.target.target.dtype)},
            "drafter": {**self.drafter, "drafts": self.proposer.num_drafts, "compiled": self.proposer.compiled},
            "batch_size": self.batch_size,
            "max_length": 1 << (self.max_length - 1).bit_length(),
        }

    def table(self, most: int, build: Build, *, repeats: int) -> CostTable:
        """Medians of ``repeats`` for trees of up to ``most`` nodes besides the root, at contexts 1024 apart."""
        room = min(self.max_length, self.target.facts.max_positions - self.proposer.num_drafts - 1) - most - 1
        last = max(room, 1)
        contexts = sorted({min(_SHORTEST, last), *range(_STEP, last, _STEP), last})
        nodes = sorted({count for count in _sizes(most + 1)})
        if self.shown:
            print(f"timing rounds of up to {most} nodes ...", file=sys.stderr, flush=True)
        verify, draft = [], []
        for context in contexts:
            roots = self._begin(context)
            draft.append(self._median(lambda roots=roots: self._draft(roots, build), repeats))  # type: ignore[misc]
            verify.append(tuple(self._median(self._judge(count), repeats) for count in nodes))
        self.target.reset()
        return CostTable(tuple(nodes), tuple(contexts), tuple(verify), tuple(draft))

    def _begin(self, context: int) -> torch.Tensor:
        logits, features, lengths = self.target.prefill([[0] * context] * self.batch_size)
        roots = logits.argmax(-1)
        self.proposer.start(features, lengths, roots)
        return roots

    def _draft(self, roots: torch.Tensor, build: Build) -> None:
        each = torch.arange(len(roots), device=roots.device)
        where = Round(each, self.target.lengths, 0)
        build(roots, self.proposer.propose(roots, where), where)

    def _judge(self, count: int) -> Callable[[], None]:
        tokens = torch.zeros(self.batch_size, count, dtype=torch.long, device=self.target.target.device)
        parents = (torch.arange(count, device=tokens.device) - 1).clamp_min(0).expand_as(tokens)

        def judge() -> None:
            self.target.verify(tokens, parents=parents)

        return judge

    def _median(self, work: Callable[[], None], repeats: int) -> float:
        spent = []
        for turn in range(_WARM_UPS + repeats):
            begin = now()[0]
            work()
            if turn >= _WARM_UPS:
                spent.append(now()[0] - begin)
        return statistics.median(spent)


def _sizes(most: int) -> list[int]:
    """1, 2, 4, 8 and on by doubling, with the middles from 16 on, up to ``most``."""
    found, size = [1], 2
    while size < most:
        found += [size, *([size + size // 2] if size >= 16 and size + size // 2 < most else [])]
        size *= 2
    return [*found, most]
