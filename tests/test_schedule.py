"""Learning-rate factor and slot weights, against the paper's numbers."""

from __future__ import annotations

import pytest
import torch

from dflash_lightning.schedule import decay_weights, warmup_cosine

WEIGHTS_16 = [1, 0.8669, 0.7515, 0.6514, 0.5647, 0.4895, 0.4244, 0.3679]
WEIGHTS_16 += [0.3189, 0.2765, 0.2397, 0.2077, 0.1801, 0.1561, 0.1353]


@pytest.mark.parametrize("block_size, decay, total", [(16, 7.0, 6.630611), (10, 5.0, 4.604759), (8, 4.0, 3.735212)])
def test_decay_weights_of_the_paper_s_blocks_sum_to(block_size: int, decay: float, total: float) -> None:
    """Same-position blocks predict one slot less than they hold."""
    assert float(decay_weights(block_size - 1, decay).sum()) == pytest.approx(total, abs=2e-6)


def test_decay_weights_of_the_paper_s_block_of_16() -> None:
    assert decay_weights(15, 7.0).tolist() == pytest.approx(WEIGHTS_16, abs=5e-5)


def test_no_decay_weighs_all_slots_alike() -> None:
    assert decay_weights(4, None).tolist() == [1.0] * 4


def test_warm_up_moves_from_the_first_step_and_ends_at_one() -> None:
    factors = [warmup_cosine(step, warmup_steps=4, total_steps=20) for step in range(21)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[12] == pytest.approx(0.5) and factors[20] == pytest.approx(0.0, abs=1e-12)
    assert factors[4:] == sorted(set(factors[4:]), reverse=True)


def test_cosine_ends_at_its_final_fraction_and_stays_there() -> None:
    factors = [warmup_cosine(step, warmup_steps=0, total_steps=10, final_fraction=0.1) for step in (0, 5, 10, 30)]
    assert factors == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_a_run_shorter_than_its_warm_up_stays_finite() -> None:
    assert warmup_cosine(3, warmup_steps=5, total_steps=4) == pytest.approx(4 / 6)
    assert warmup_cosine(5, warmup_steps=5, total_steps=5) == pytest.approx(1.0)


@pytest.mark.parametrize("decay", [None, 2.0])
def test_decay_weights_are_made_where_they_are_needed(decay: float | None) -> None:
    assert decay_weights(3, decay, device=torch.device("meta")).device.type == "meta"


def test_decay_weights_are_fp32() -> None:
    assert decay_weights(3, 2.0).dtype == torch.float32
