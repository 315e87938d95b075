"""How sure a tau or a difference of two is: prompts and seeds are drawn anew, the same ones for both of a pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.decoding.interval import LEVEL

DRAWS = 2000


@dataclass(frozen=True)
class Counts:
    """Committed tokens and rounds of a method, per seed and prompt."""

    committed: Float[Tensor, "S P"]
    rounds: Float[Tensor, "S P"]

    def taus(self, weights: Float[Tensor, "B P"]) -> Float[Tensor, "B S"]:
        """Pooled tau of every seed, with each prompt counted as often as ``weights`` say."""
        return (weights @ self.committed.T) / (weights @ self.rounds.T)

    @property
    def tau_by_seed(self) -> list[float]:
        """Pooled over all prompts; NaN without a round."""
        return (self.committed.sum(1) / self.rounds.sum(1)).tolist()

    def of(self, prompts: Sequence[int]) -> Counts:
        """The same of some of the prompts."""
        return Counts(self.committed[:, prompts], self.rounds[:, prompts])

    def of_seeds(self, seeds: Sequence[int]) -> Counts:
        """The same of some of the seeds."""
        return Counts(self.committed[seeds], self.rounds[seeds])


def tau_estimate(counts: Counts, domains: Sequence[str]) -> dict[str, Any]:
    """Mean over seeds of the pooled tau, its spread over them, and the interval of other prompts and seeds."""
    drawn = _drawn(counts, domains)
    return estimate(counts.tau_by_seed, interval=_interval(drawn))


def difference_estimate(counts: Counts, baseline: Counts, domains: Sequence[str]) -> dict[str, Any]:
    """The same of the tau minus the baseline's, seed by seed and prompt by prompt of the same ones."""
    by_seed = [mine - theirs for mine, theirs in zip(counts.tau_by_seed, baseline.tau_by_seed, strict=True)]
    return estimate(by_seed, interval=_interval(_drawn(counts, domains) - _drawn(baseline, domains)))


def estimate(values: Sequence[float], *, interval: tuple[float, float] | None = None) -> dict[str, Any]:
    """``mean``, ``spread`` (standard deviation over seeds, null of one), ``low``, ``high`` and ``n``.

    Without an ``interval``, ``low`` and ``high`` are the smallest and the largest value. One value that is NaN makes
    mean, spread and interval NaN: nothing is left out.
    """
    mean = sum(values) / len(values)
    low, high = (min(values), max(values)) if interval is None else interval
    if math.isnan(mean):
        low = high = math.nan
    squares = sum((value - mean) ** 2 for value in values)
    spread = math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else None
    return {"mean": mean, "spread": spread, "low": low, "high": high, "n": len(values)}


def _drawn(counts: Counts, domains: Sequence[str]) -> Float[Tensor, " B"]:
    """Means over drawn seeds of the tau over drawn prompts; for equal seeds and prompts always the same draws.

    A domain's prompts are drawn among themselves: how many there are of each is part of the bench.
    """
    taus = counts.taus(_weights(tuple(domains)))
    return taus.gather(1, _seeds(len(counts.committed))).mean(1)


@lru_cache(maxsize=8)
def _weights(domains: tuple[str, ...]) -> Float[Tensor, "B P"]:
    """How often each prompt was drawn, in each draw."""
    weights = torch.zeros(DRAWS, len(domains), dtype=torch.float64)
    for number, domain in enumerate(sorted(set(domains))):
        places = torch.tensor([i for i, name in enumerate(domains) if name == domain])
        generator = torch.Generator().manual_seed(1 + number)
        picked = places[torch.randint(len(places), (DRAWS, len(places)), generator=generator)]
        weights.scatter_add_(1, picked, torch.ones_like(picked, dtype=torch.float64))
    return weights


def _seeds(count: int) -> Int[Tensor, "B S"]:
    return torch.randint(count, (DRAWS, count), generator=torch.Generator().manual_seed(0))


def _interval(drawn: Float[Tensor, " B"]) -> tuple[float, float]:
    drawn = drawn[drawn.isfinite()]
    if not len(drawn):
        return math.nan, math.nan
    edge = (1 - LEVEL) / 2
    low, high = drawn.quantile(torch.tensor([edge, 1 - edge], dtype=torch.float64)).tolist()
    return low, high


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's: the correlation of the ranks, equal values sharing theirs; null of fewer than three."""
    if len(first) < 3:
        return None
    ranks = torch.tensor([_ranks(first), _ranks(second)], dtype=torch.float64)
    centred = ranks - ranks.mean(1, keepdim=True)
    norms = centred.norm(dim=1)
    return None if not bool((norms > 0).all()) else float(centred[0] @ centred[1] / norms.prod())


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]
