"""The plan of an epoch is a pure function of (seed, epoch), shared out evenly over ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dflash_lightning.data.batch.packing import Planner, PlanSettings, pack_best_fit, rank_share, window_bounds

SETTINGS = PlanSettings(seed=3, packing=True, row_tokens=64, row_blocks=None, rows_per_batch=2)
LENGTHS = [int(n) for n in np.random.default_rng(0).integers(3, 60, size=101)]
BLOCKS = [n // 3 for n in LENGTHS]


def planner(**changes: object) -> Planner:
    return Planner(range(len(LENGTHS)), LENGTHS, BLOCKS, replace(SETTINGS, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("packing", [True, False])
def test_every_document_occurs_once_per_epoch(packing: bool) -> None:
    for epoch in range(3):
        batches = planner(packing=packing).epoch(epoch)
        assert sorted(d for batch in batches for pack in batch for d in pack) == list(range(len(LENGTHS)))
        assert all(len(batch) <= 2 for batch in batches) and len(batches) == planner(packing=packing).num_micro_batches


@pytest.mark.parametrize("packing", [True, False])
def test_epochs_differ_and_repeat_exactly(packing: bool) -> None:
    first, again = planner(packing=packing), planner(packing=packing)
    assert first.epoch(4) == again.epoch(4)
    assert first.epoch(4) != first.epoch(5)
    assert first.epoch(4) != planner(packing=packing, seed=4).epoch(4)


def test_packs_stay_within_tokens_and_blocks_and_are_nearly_full() -> None:
    packs = planner(row_blocks=18).packs
    assert all(sum(LENGTHS[d] for d in pack) <= 64 for pack in packs)
    assert all(sum(BLOCKS[d] for d in pack) <= 18 or len(pack) == 1 for pack in packs)
    assert any(sum(BLOCKS[d] for d in pack) > 18 for pack in packs)
    full = planner().packs
    assert sum(LENGTHS) / (64 * len(full)) > 0.93


@pytest.mark.parametrize("packing", [True, False])
def test_the_largest_row_is_that_of_the_packs(packing: bool) -> None:
    plan = Planner([number + 7 for number in range(len(LENGTHS))], LENGTHS, BLOCKS, replace(SETTINGS, packing=packing))
    rows = [pack for batch in plan.epoch(0) for pack in batch]
    tokens, blocks = (max(sum(of[d - 7] for d in row) for row in rows) for of in (LENGTHS, BLOCKS))
    assert plan.largest_row() == (tokens, blocks)


def test_best_fit_prefers_the_fullest_row_that_holds_the_document() -> None:
    lengths, none = np.array([5, 6, 3, 5]), np.zeros(4, dtype=np.int64)
    assert pack_best_fit([0, 1, 2, 3], lengths, none, 10, None) == [[0, 3], [1, 2]]  # first-fit would put 3 with 5


def test_unpacked_batches_join_documents_of_similar_length() -> None:
    batches = planner(packing=False, rows_per_batch=4).epoch(0)
    padded = sum(max(LENGTHS[d] for (d,) in batch) * len(batch) for batch in batches)
    assert padded < 1.1 * sum(LENGTHS)


def test_ranks_share_the_plan_and_short_ranks_get_empty_batches() -> None:
    batches = planner().epoch(1)[:5]
    shares = [rank_share(batches, rank, 3) for rank in range(3)]
    assert shares == [[batches[0], batches[3]], [batches[1], batches[4]], [batches[2], ()]]


def test_windows_end_where_lightning_steps() -> None:
    assert window_bounds(7, 3, 7) == [(0, 3), (3, 6), (6, 7)]
    assert window_bounds(7, 3, 5)[:2] == [(0, 3), (3, 5)]
    assert window_bounds(2, 4, 2) == [(0, 2)]


def test_digest_tells_other_data_and_settings_apart() -> None:
    other = Planner(range(len(LENGTHS)), LENGTHS[::-1], BLOCKS, SETTINGS)
    assert len({planner().digest(), planner(seed=9).digest(), planner(row_tokens=80).digest(), other.digest()}) == 4
    assert planner().digest() == planner().digest()


def test_few_anchors_leave_documents_room_beside_each_other() -> None:
    """The limit is on a row's blocks, as the paper's; a document with few of them is no reason for a row of its own."""
    few = [Planner(range(20), [30] * 20, [8] * 20, replace(SETTINGS, row_blocks=limit)) for limit in (512, None)]
    assert few[0].packs == few[1].packs and len(few[0].packs) == 10 and not few[0].blocks_forbid_packing()
    alone = Planner(range(20), [30] * 20, [8] * 20, replace(SETTINGS, row_blocks=8))
    assert len(alone.packs) == 20 and alone.blocks_forbid_packing()
    long = Planner(range(20), [60] * 20, [8] * 20, replace(SETTINGS, row_blocks=8))
    assert not long.blocks_forbid_packing()  # they would not fit anyway
