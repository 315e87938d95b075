"""Statistics are ratios of sums: worked vectors, and independence of how rounds are grouped."""

import math

import pytest

from dflash_lightning.decoding.stats import STAGES, DecodeStats
from dflash_lightning.decoding.types import Generation


def stats_of(num_drafts: int, rounds: list[tuple[int, int, int]]) -> DecodeStats:
    stats = DecodeStats(num_drafts)
    for width, accepted, committed in rounds:
        depth = min(accepted + 1, width)
        stats.add_round(depth=depth, nodes=width, accepted=accepted, committed=committed, narrowed=width < num_drafts)
    return stats


def test_worked_vector_with_widths_and_a_cut_round() -> None:
    """five rounds of seven drafts, one verified four wide, one cut by a stop token."""
    stats = stats_of(7, [(7, 7, 8), (7, 2, 3), (7, 0, 1), (4, 4, 5), (7, 5, 3)])
    assert stats.tau == 4.0
    assert stats.tau_whole == 4.25
    assert stats.verify_rate == 20 / 37
    assert stats.at_risk == [4, 3, 3, 2, 1, 1, 1]
    assert stats.conditional_acceptance == pytest.approx([0.75, 1, 2 / 3, 1, 1, 1, 1])
    assert stats.survival == pytest.approx([0.75, 0.75, 0.5, 0.5, 0.5, 0.5, 0.5])
    assert sum(stats.survival) == pytest.approx(4.0)
    assert stats.histogram == [1, 0, 1, 0, 0, 0, 0, 1]
    assert stats.ceiling == 1 / 3
    assert stats.full_accept == 1 / 2


def test_acceptance_length_of_four_runs() -> None:
    """runs of 3, 2, 1, 0 of three drafts; a product of averaged accuracies would say 1.25 instead of 1.5."""
    stats = stats_of(3, [(3, 3, 4), (3, 2, 3), (3, 1, 2), (3, 0, 1)])
    assert stats.tau == 2.5
    assert stats.whole_accepted / stats.whole_rounds == 1.5
    assert stats.accepted_share == 0.5
    assert stats.survival == pytest.approx([0.75, 0.5, 0.25])


def test_l7_a_tree_is_counted_by_depth_and_paid_for_by_node() -> None:
    """Trees of eight nodes, three deep: a whole path, a leaf at depth 2, a rejection at depth 2, one at the root.

    Counted by nodes, the first round would stand beyond the last slot, and no round would be in the histogram.
    """
    stats = DecodeStats(3)
    for depth, accepted in ((3, 3), (2, 2), (2, 1), (1, 0)):
        stats.add_round(depth=depth, nodes=8, accepted=accepted, committed=accepted + 1)
    assert stats.histogram == [1, 1, 1, 1] and stats.ceiling == 1 / 4
    assert stats.full_accept == 1 / 2  # the whole path and the leaf
    assert stats.accepted_share == 6 / 32
    assert stats.verify_rate == 10 / (32 + 4)
    assert stats.at_risk == [4, 3, 1] and stats.stood == [3, 2, 1]
    assert stats.tau == stats.tau_whole == 2.5


def test_grouping_of_rounds_does_not_matter() -> None:
    rounds = [(3, 3, 4), (3, 1, 2), (3, 2, 3), (3, 0, 1)]
    assert stats_of(3, rounds[:2]) + stats_of(3, rounds[2:]) == stats_of(3, rounds)
    assert stats_of(3, rounds[:1]) + stats_of(3, []) + stats_of(3, rounds[1:]) == stats_of(3, rounds)


def test_a_cut_round_counts_its_tokens_and_nothing_else() -> None:
    whole, cut = stats_of(3, [(3, 1, 2)]), stats_of(3, [(3, 1, 2), (3, 3, 2)])
    assert cut.committed == whole.committed + 2 and cut.rounds == 2
    assert (cut.histogram, cut.at_risk, cut.stood) == (whole.histogram, whole.at_risk, whole.stood)


def test_pooled_tau_is_not_the_mean_of_requests() -> None:
    """rounds [8, 8] and [1] * 8 pool to 2.4; the requests' own ratios average 4.5."""
    stats = DecodeStats(7)
    for request, committed in enumerate(([8, 8], [1] * 8)):
        for count in committed:
            stats.add_round(depth=min(count, 7), nodes=7, accepted=count - 1, committed=count)
        stats.add_request(
            Generation(request, [0] * (1 + sum(committed)), committed, [c - 1 for c in committed], "length")
        )
    assert stats.tau == 2.4
    assert stats.tau_per_request == 4.5
    assert stats.generated == 26 and stats.requests == 2


def test_the_first_token_counted_twice_is_an_error() -> None:
    with pytest.raises(AssertionError, match="counted twice"):
        DecodeStats(3).add_request(Generation(0, [1, 2, 3], [3], [2], "length"))


def test_nothing_counted_is_not_a_number_and_nothing_accepted_is_zero() -> None:
    assert math.isnan(DecodeStats(3).tau) and math.isnan(DecodeStats(3).survival[0])
    rejected = stats_of(3, [(3, 0, 1)])
    assert rejected.survival == [0.0, 0.0, 0.0]
    assert rejected.conditional_acceptance[0] == 0.0 and math.isnan(rejected.conditional_acceptance[1])


def test_sums_survive_the_trip_through_tensors() -> None:
    stats = stats_of(3, [(3, 3, 4), (3, 1, 2), (3, 2, 1)])
    stats.request_tau_sum, stats.cycles, stats.compiled_cycles = 2.5, 3, 3
    stats.seconds = [0.5 * i for i in range(len(STAGES))]
    stats.cpu_seconds = [0.25 * i for i in range(len(STAGES))]
    counts, reals = stats.tensors()
    assert (len(counts), len(reals)) == DecodeStats.sizes(3)
    assert DecodeStats.from_tensors(3, counts, reals) == stats
    assert stats.compiled and stats.stage_ms("draft") == pytest.approx(1e3 * 0.5 / 3)
