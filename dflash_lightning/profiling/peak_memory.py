"""The most memory that a piece of work takes beyond what was held before it."""

from __future__ import annotations

import gc
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_lightning.device import begin_peak, peak_bytes

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class PeakMemory:
    """Bytes held at most since ``begin``, beyond those held then: of the process, and of the GPU where one is used."""

    growth: int
    cuda: int | None

    def figures(self) -> dict[str, int | None]:
        """For JSON."""
        return {"growth_bytes": self.growth, "cuda_growth_bytes": self.cuda}


class MemoryWatch:
    """Watches from where it is made.

    On Linux the kernel's own mark of the highest use is set back first, so that what was given back before does not
    count. Elsewhere only a new highest use of the process is seen.
    """

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        self._device = device
        self._can_reset = _set_back()
        self._before = _held() if self._can_reset else _highest()
        self._there = begin_peak(device)

    def peak(self) -> PeakMemory:
        """So far."""
        peak = peak_bytes(self._device)
        there = None if peak is None or self._there is None else peak - self._there
        return PeakMemory(max(0, _highest() - self._before), there)


def _set_back() -> bool:
    """Whether the mark could be moved to what is held now."""
    try:
        _CLEAR.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _held() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _highest() -> int:
    if _STATUS.exists():
        lines = (line.split() for line in _STATUS.read_text(encoding="utf-8").splitlines())
        marks = [int(words[1]) * 1024 for words in lines if words and words[0] == "VmHWM:"]
        if marks:
            return marks[0]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
