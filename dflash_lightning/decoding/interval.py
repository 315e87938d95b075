"""How sure a tau is: intervals by drawing prompts anew."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_lightning.decoding.types import Generation

_DRAWS = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """The middle 95 % of what other prompts of the same kind would have given."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:.2f} to {self.high:.2f}"

    def as_list(self) -> list[float]:
        """Both ends, for a JSON report."""
        return [self.low, self.high]


def pooled_tau(generations: Sequence[Generation]) -> float:
    """Tokens committed per round over all answers; NaN without a round."""
    rounds = sum(len(generation.committed) for generation in generations)
    return sum(sum(generation.committed) for generation in generations) / rounds if rounds else math.nan


def tau_interval(generations: Sequence[Generation], *, seed: int = 0) -> Interval | None:
    """Bootstrap over prompts of the pooled tau, always the same for the same answers; null with fewer than two.

    Rounds of one answer are alike, so prompts are drawn and not rounds.
    """
    committed, rounds = _sums(generations)
    return _interval(_draw(committed, rounds, seed)) if len(generations) > 1 and bool(rounds.any()) else None


def difference_interval(first: Sequence[Generation], second: Sequence[Generation], *, seed: int = 0) -> Interval | None:
    """The same of the second tau minus the first, on the same prompts: both are drawn together."""
    assert len(first) == len(second), "a pair of answers per prompt"
    sums = [_sums(generations) for generations in (first, second)]
    if len(first) < 2 or not all(bool(rounds.any()) for _, rounds in sums):
        return None
    before, after = (_draw(committed, rounds, seed) for committed, rounds in sums)
    return _interval(after - before)


def _sums(generations: Sequence[Generation]) -> tuple[Tensor, Tensor]:
    committed = torch.tensor([sum(generation.committed) for generation in generations], dtype=torch.float64)
    rounds = torch.tensor([len(generation.committed) for generation in generations], dtype=torch.float64)
    return committed, rounds


def _draw(committed: Tensor, rounds: Tensor, seed: int) -> Tensor:
    """Taus of ``_DRAWS`` samples of as many prompts; equal seeds draw equal prompts."""
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randint(len(committed), (_DRAWS, len(committed)), generator=generator)
    return committed[picked].sum(1) / rounds[picked].sum(1)


def _interval(taus: Tensor) -> Interval | None:
    taus = taus[taus.isfinite()]  # a sample of answers without a round has none
    if not len(taus):
        return None
    edge = (1 - LEVEL) / 2
    low, high = taus.quantile(torch.tensor([edge, 1 - edge], dtype=torch.float64)).tolist()
    return Interval(low, high)
