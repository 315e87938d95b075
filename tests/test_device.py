"""What a device's abilities switch on, held on the CPU with marks and copies that are counted."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from dflash_lightning import device as device_file
from dflash_lightning.data.batch import of_trainer
from dflash_lightning.decoding import stats as stats_file
from dflash_lightning.decoding.stats import STAGES, DecodeStats, StageClock
from dflash_lightning.device import Abilities, abilities, begin_peak, mark, peak_bytes, send, send_list, wait
from dflash_lightning.ops import clock as clock_file
from dflash_lightning.ops.clock import DeviceSeconds
from dflash_lightning.testing.toys import toy_batch, toy_module

CPU = torch.device("cpu")


def test_a_cpu_copies_nothing_waits_for_nothing_and_marks_nothing() -> None:
    values = torch.arange(3)
    assert send(values, CPU) is values and send_list([1.5, 2.5], CPU).tolist() == [1.5, 2.5]
    assert send_list([1], CPU, torch.float64).dtype == torch.float64
    assert mark(CPU) is None and peak_bytes(CPU) is None and begin_peak(CPU) is None
    wait(CPU)


def test_a_kind_of_device_that_is_not_known_can_do_the_least() -> None:
    assert abilities(torch.device("meta")) == Abilities(queues=True)
    gpu = abilities(torch.device("cuda"))
    assert gpu.queues and gpu.flex and gpu.pins and gpu.events and gpu.measures and gpu.streams and not gpu.own_kernels


@pytest.mark.parametrize("pins", [False, True])
def test_values_are_sent_without_a_wait_and_from_pinned_memory_where_there_is_some(
    pins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    monkeypatch.setitem(device_file._KNOWN, "cpu", Abilities(pins=pins))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: done.append("pinned") or self)
    move = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *a, **named: done.append(named) or move(self, *a, **named))
    assert send_list([4, 5], CPU).tolist() == [4, 5]
    assert done == [*(["pinned"] if pins else []), {"non_blocking": True}]


def test_a_batch_is_pinned_where_that_helps_and_left_alone_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = toy_batch(toy_module())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 0)
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert of_trainer.pinned(batch, trainer) is batch and of_trainer.pinned(batch, None) is batch
    monkeypatch.setitem(device_file._KNOWN, "cpu", Abilities(pins=True))
    pinned = of_trainer.pinned(batch, trainer)
    assert pinned.input_ids is not batch.input_ids and torch.equal(pinned.input_ids, batch.input_ids)
    assert pinned.layout.rows is not batch.layout.rows and torch.equal(pinned.layout.rows, batch.layout.rows)


class Mark:
    """A mark of a GPU that is a second, in its own time, behind the one before."""

    def __init__(self, at: int) -> None:
        self.at, self.waited = at, False

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, later: Mark) -> float:
        return 1000.0 * (later.at - self.at)


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Mark]]:
    """All marks that are set, on a CPU that plays a GPU; the program itself takes no time, and never waits."""
    made: list[Mark] = []

    def make(*device: torch.device, timed: bool = True) -> Mark:
        assert timed
        made.append(Mark(len(made)))
        return made[-1]

    monkeypatch.setattr(stats_file, "gpu_mark", make)
    monkeypatch.setattr(clock_file, "mark", make)
    monkeypatch.setattr(stats_file, "time", SimpleNamespace(perf_counter=lambda: 7.0, process_time=lambda: 3.0))
    yield made


def test_stages_on_a_gpu_are_timed_by_marks_that_are_read_at_the_end(
    marks: list[Mark], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(stats_file, "now", lambda: waits.append(1) or (5.0 + 10 * len(waits), 3.0))
    stats = DecodeStats(3)
    clock = StageClock(stats)
    for stage in ("prefill", "draft", "verify", "commit", "host", "draft", "verify"):
        clock.ends(stage)
    assert len(waits) == 1 and stats.seconds == [0.0] * len(STAGES)
    clock.stop()
    assert len(waits) == 2 and len(marks) == 8
    assert dict(zip(STAGES, stats.seconds, strict=True)) == {
        **{"prefill": 1.0, "draft": 2.0, "verify": 2.0, "commit": 1.0, "host": 1.0},
        "total": 10.0,
    }


def test_what_a_gpu_takes_is_read_when_it_is_asked_for(marks: list[Mark]) -> None:
    seconds = DeviceSeconds()
    for _ in range(2):
        with seconds.timed(CPU):
            pass
    assert not any(one.waited for one in marks)
    assert seconds.take() == 2.0 and marks[3].waited and seconds.take() == 0.0
