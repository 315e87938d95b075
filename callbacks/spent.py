"""How much time a run's training has taken, over all of its sessions."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class TrainingCost(Callback):
    """Wall and CPU seconds of the training loop, of this process and all its threads.

    Callbacks that measure (they have ``seconds`` and ``cpu_seconds``) are left out, and so is what comes before the
    first step: reading data, making kept features. The sums stand in the checkpoint. A run that was killed goes on with
    what the work behind its checkpoint has taken, and what was lost with the process does not count.
    """

    def __init__(self) -> None:
        self._before = (0.0, 0.0)  # of earlier sessions
        self._begin: tuple[float, float] | None = None  # null while no training goes on
        self._measuring: list[Any] = []  # callbacks that say what they have taken

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._measuring = [callback for callback in callbacks if hasattr(callback, "cpu_seconds")]
        self._begin = self._clock()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before, self._begin = self._total(), None

    @property
    def seconds(self) -> dict[str, float]:
        """``wall_s`` and ``cpu_s`` so far."""
        wall, cpu = self._total()
        return {"wall_s": wall, "cpu_s": cpu}

    def state_dict(self) -> dict[str, Any]:
        return self.seconds

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = (state_dict["wall_s"], state_dict["cpu_s"])

    def _clock(self) -> tuple[float, float]:
        """Seconds that did not go into evaluations, since some moment."""
        wall, cpu = (sum(getattr(c, name) for c in self._measuring) for name in ("seconds", "cpu_seconds"))
        return time.monotonic() - wall, time.process_time() - cpu

    def _total(self) -> tuple[float, float]:
        if self._begin is None:
            return self._before
        now = self._clock()
        return self._before[0] + now[0] - self._begin[0], self._before[1] + now[1] - self._begin[1]
