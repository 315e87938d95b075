"""The one clock of what is timed: wall and CPU seconds, read when the device has done what it was given."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dflash_lightning.device import Mark, mark, wait_for_gpu


@dataclass
class Spent:
    """Seconds that were spent in ``timed`` blocks: of the wall clock, and of this process's threads together."""

    wall: float = 0.0
    cpu: float = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add what the block takes. One that fails is not counted."""
        begin = now()
        yield
        self.add(begin, now())

    def add(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        """Add the time between two readings of ``now``."""
        self.wall += end[0] - begin[0]
        self.cpu += end[1] - begin[1]


def now() -> tuple[float, float]:
    """Wall and CPU seconds since some moment. Waits for a GPU that is in use."""
    wait_for_gpu()
    return time.perf_counter(), time.process_time()


class DeviceSeconds:
    """Seconds that a device spends in ``timed`` blocks; no GPU is waited for before ``take`` is called."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._pairs: list[tuple[Mark, Mark]] = []

    @contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """Add what ``device`` takes for the block. One that fails is not counted."""
        begin, begins = time.perf_counter(), mark(device, timed=True)
        yield
        ends = mark(device, timed=True)
        if begins is None or ends is None:
            self._seconds += time.perf_counter() - begin
        else:
            self._pairs.append((begins, ends))

    def take(self) -> float:
        """All since the last call."""
        for begins, ends in self._pairs:
            ends.synchronize()
            self._seconds += begins.elapsed_time(ends) / 1e3
        found, self._seconds, self._pairs = self._seconds, 0.0, []
        return found
