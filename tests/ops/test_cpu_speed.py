"""Whether bfloat16 is fast here is measured, once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dflash_lightning.ops import cpu_speed
from dflash_lightning.ops.cpu_speed import bfloat16_is_fast, bfloat16_is_slow, bfloat16_ratio


@pytest.fixture(autouse=True)
def _measure_anew() -> Iterator[None]:
    bfloat16_ratio.cache_clear()
    yield
    bfloat16_ratio.cache_clear()


@pytest.mark.parametrize(
    ("bfloat16", "fast", "slow"), [(0.5, True, False), (1.0, False, False), (1.5, False, False), (60.0, False, True)]
)
def test_slow_is_more_than_twice_as_long_and_fast_clearly_shorter(
    monkeypatch: pytest.MonkeyPatch, bfloat16: float, fast: bool, slow: bool
) -> None:
    seconds = {torch.bfloat16: bfloat16, torch.float32: 1.0}
    asked: list[torch.dtype] = []
    monkeypatch.setattr(cpu_speed, "_seconds", lambda dtype: asked.append(dtype) or seconds[dtype])
    assert bfloat16_is_slow() is slow and bfloat16_is_fast() is fast
    assert len(asked) == 2


def test_the_measurement_times_products_of_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[tuple[torch.dtype, int]] = []
    product = cpu_speed._product
    monkeypatch.setattr(
        cpu_speed, "_product", lambda factor: timed.append((factor.dtype, len(factor))) or product(factor)
    )
    state = torch.get_rng_state()
    assert isinstance(bfloat16_is_slow(), bool)
    assert {dtype for dtype, side in timed if side > 100} == {torch.bfloat16, torch.float32}
    assert torch.equal(state, torch.get_rng_state())
