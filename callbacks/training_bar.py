"""How far training has come: one bar over all optimizer steps of the run, evaluations included."""

from __future__ import annotations

import math
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar

from dflash_lightning.progress import Progress, print_line

_NOTE_SECONDS = 2.0  # between two readings of the loss, which wait for a GPU


class TrainingBar(ProgressBar):
    """Steps done and time left over the whole run, with the last loss and tau; replaces Lightning's bar per epoch.

    Recipes get it unless ``trainer.enable_progress_bar`` is false or another bar is among the callbacks. Without a
    terminal it prints a line now and then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._bar: Progress | None = None
        self._next_note = 0.0

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        print_line(sep.join(map(str, args)))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        total = trainer.estimated_stepping_batches
        self._bar = Progress(
            "training",
            None if math.isinf(total) else int(total),
            shown=self._enabled,
            initial=trainer.global_step,
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._bar is None or not self._enabled or trainer.global_step == self._bar.done:
            return
        if time.monotonic() >= self._next_note:
            self._bar.note(_note(trainer))
            self._next_note = time.monotonic() + _NOTE_SECONDS
        self._bar.update(trainer.global_step - self._bar.done)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _note(trainer: Trainer) -> str:
    parts = []
    for label, metric in (("loss", "train/loss"), ("tau", "decode/tau")):
        value = trainer.callback_metrics.get(metric)
        if value is not None:
            parts.append(f"{label} {float(value):.2f}")
    return ", ".join(parts)
