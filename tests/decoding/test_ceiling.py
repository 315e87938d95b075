"""What a longer block could gain: worked numbers of the sheets."""

import math

import pytest

from dflash_lightning.decoding import DecodeStats
from dflash_lightning.decoding.ceiling import expected_gain, headroom, survival_of


def test_the_mean_is_the_sum_of_the_survivals():
    """MT 7: two rounds of 0 drafts, three of 3, one of 7, four of 15; blocks of 16 that grow to 24."""
    histogram = [2, 0, 0, 3, 0, 0, 0, 1, *[0] * 7, 4]
    survival, rounds = survival_of(histogram), sum(histogram)
    mean = sum(n * count for n, count in enumerate(histogram)) / rounds
    assert sum(survival) == pytest.approx(mean) == pytest.approx(7.6)
    assert survival[-1] == pytest.approx(0.4) and headroom(0.4, 8) == pytest.approx(3.2)


def test_the_expected_gain_of_a_wider_block():
    """MD L7, whose second example takes the mean over all conditional shares, .88194; here the last three count."""
    assert expected_gain(_ending(0.2, 0.9), 8) == pytest.approx(1.0252, abs=1e-4)
    assert expected_gain(_ending(0.2, 0.9), 0) == 0.0
    histogram = [12, 10, 9, 8, 7, 6, 6, 42]
    survival = survival_of(histogram)
    assert [round(s, 2) for s in survival] == [0.88, 0.78, 0.69, 0.61, 0.54, 0.48, 0.42]
    assert sum(survival) == pytest.approx(4.4) and survival[-1] == pytest.approx(0.42)
    shares = [b / a for a, b in zip([1.0, *survival], survival, strict=False)]
    assert shares == pytest.approx([0.88, 0.8864, 0.8846, 0.8841, 0.8852, 0.8889, 0.875], abs=1e-4)
    share = sum(shares[-3:]) / 3
    assert expected_gain(survival, 8) == pytest.approx(0.42 * sum(share**k for k in range(1, 9)))
    assert 0.42 * sum(0.88194**k for k in range(1, 9)) == pytest.approx(1.989, abs=1e-3)


def _ending(ceiling: float, share: float) -> list[float]:
    """A survival that ends at ``ceiling`` after three drafts that each stood in ``share`` of the rounds."""
    return [ceiling / share**3, ceiling / share**2, ceiling / share, ceiling]


def test_a_block_that_is_never_filled_gains_nothing():
    assert expected_gain([0.5, 0.0], 8) == 0.0 and expected_gain([], 8) == 0.0
    assert all(math.isnan(share) for share in survival_of([0, 0, 0]))


def test_statistics_of_decoding_count_the_ceiling_over_whole_rounds():
    stats = DecodeStats(3)
    for accepted, committed in ((3, 4), (3, 2), (1, 2), (0, 1)):  # the second was cut by a stop token
        stats.add_round(depth=min(accepted + 1, 3), nodes=3, accepted=accepted, committed=committed)
    assert stats.histogram == [1, 1, 0, 1] and stats.ceiling == pytest.approx(1 / 3)
    assert survival_of(stats.histogram) == pytest.approx(stats.survival)
