"""Intervals over prompts and seeds: against the formula, on pairs, and the same every time."""

from __future__ import annotations

import math

import pytest
import torch

from dflash_lightning.bench.bootstrap import Counts, difference_estimate, estimate, rank_correlation, tau_estimate

DOMAINS = ["code"] * 30 + ["chat"] * 10


def _counts(seeds: int, seed: int = 0, more: float = 0.0, spread: float = 0.0) -> Counts:
    """Rounds of 10 and about 20 tokens, ``more`` of them for every prompt; seeds lie ``spread`` apart."""
    draw = torch.Generator().manual_seed(seed)
    prompts = 20 + 4 * torch.randn(40, generator=draw, dtype=torch.float64) + 10 * more
    committed = prompts + spread * 10 * torch.arange(seeds, dtype=torch.float64)[:, None]
    return Counts(committed, torch.full((seeds, 40), 10.0, dtype=torch.float64))


def test_without_a_spread_over_seeds_the_interval_is_that_of_the_mean_of_prompts() -> None:
    counts = _counts(1)
    found = tau_estimate(counts, ["all"] * 40)
    taus = counts.committed[0] / 10
    assert found["mean"] == pytest.approx(float(taus.mean()))
    assert found["spread"] is None and found["n"] == 1
    half = 1.96 * float(taus.std(correction=0)) / math.sqrt(40)
    assert found["high"] - found["mean"] == pytest.approx(half, rel=0.08)
    assert found["mean"] - found["low"] == pytest.approx(half, rel=0.08)


def test_seeds_that_differ_widen_the_interval_and_make_the_spread() -> None:
    alike, apart = (tau_estimate(_counts(3, spread=spread), DOMAINS) for spread in (0.0, 0.5))
    assert alike["spread"] == 0.0
    assert apart["spread"] == pytest.approx(0.5)  # of 0, .5 and 1
    assert apart["high"] - apart["low"] > 2 * (alike["high"] - alike["low"])


def test_domains_keep_their_share_in_every_draw() -> None:
    """Two domains whose prompts are all alike: a draw of prompts within them changes nothing."""
    committed = torch.tensor([[30.0] * 30 + [10.0] * 10], dtype=torch.float64)
    found = tau_estimate(Counts(committed, torch.full_like(committed, 10.0)), DOMAINS)
    assert found["low"] == found["mean"] == found["high"] == pytest.approx(2.5)


def test_the_pooled_tau_is_a_ratio_of_sums() -> None:
    counts = Counts(torch.tensor([[30.0, 2.0]]).double(), torch.tensor([[10.0, 2.0]]).double())
    assert counts.tau_by_seed == [pytest.approx(32 / 12)]
    assert counts.of([1]).tau_by_seed == [1.0]


def test_a_pair_is_drawn_together_so_that_what_both_share_cancels() -> None:
    """A constant lead on prompts that differ widely is certain, although either tau alone is not."""
    plain, better = _counts(3, spread=0.5), _counts(3, spread=0.5, more=0.1)
    found = difference_estimate(better, plain, DOMAINS)
    assert found["mean"] == pytest.approx(0.1)
    assert found["low"] == pytest.approx(0.1) and found["high"] == pytest.approx(0.1)
    alone = tau_estimate(plain, DOMAINS)
    assert alone["high"] - alone["low"] > 0.1
    other = difference_estimate(_counts(3, seed=1, spread=0.5), plain, DOMAINS)
    assert other["low"] < other["mean"] < other["high"]


def test_equal_figures_give_equal_intervals_every_time() -> None:
    state = torch.random.get_rng_state()
    assert tau_estimate(_counts(2, spread=0.2), DOMAINS) == tau_estimate(_counts(2, spread=0.2), DOMAINS)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_answers_without_a_round_have_no_interval() -> None:
    nothing = torch.zeros(1, 3, dtype=torch.float64)
    found = tau_estimate(Counts(nothing, nothing), ["a"] * 3)
    assert math.isnan(found["mean"]) and math.isnan(found["low"])
    assert math.isnan(tau_estimate(Counts(nothing.expand(2, 3), nothing.expand(2, 3)), ["a"] * 3)["spread"])


def test_other_figures_are_told_by_their_smallest_and_largest_seed() -> None:
    assert estimate([1.0, 2.0, 6.0]) == {"mean": 3.0, "spread": pytest.approx(7**0.5), "low": 1.0, "high": 6.0, "n": 3}
    assert estimate([4.0])["spread"] is None


def test_rank_correlation_is_spearmans() -> None:
    assert rank_correlation([1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 1000.0]) == pytest.approx(1.0)
    assert rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)
    # Equal values share a rank: 1 - 6 sum d^2 / (n (n^2 - 1)) does not hold then, the correlation of ranks does.
    assert rank_correlation([1.0, 2.0, 2.0, 4.0], [1.0, 2.0, 3.0, 4.0]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert rank_correlation([1.0, 2.0], [1.0, 2.0]) is None
    assert rank_correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None
