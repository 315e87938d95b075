"""Ends a run that is asked to end (Ctrl-C, SIGTERM, a time limit) where nothing is lost: saved, and on all ranks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RunCut(BaseException):
    """The run ended before its planned end because it was asked to; ``last.ckpt`` holds where it stood.

    Not an ``Exception``, so that nothing on the way takes it for a fault.
    """


class Stopper(Callback):
    """Saves and ends a run that is asked to end before its planned end.

    The planned end is ``max_epochs`` or ``max_steps``, or what ``EarlyStopping`` decides. A signal, ``max_time`` and
    any other callback that sets ``should_stop`` cut the run: the same command goes on with it later.

    *While it trains* a signal waits for the end of the micro-batch. Then all ranks agree (Lightning waits for the
    device at that point in any case), save ``last`` together and end with ``RunCut``; gradients of an unfinished
    accumulation window are made again on resuming. *While it does something else* (features, an evaluation, which has
    saved before it began) a signal ends it at once, as a second one does always.

    Without an evaluation nobody else may write ``last`` at the end of an epoch: this does.

    Args:
        last: the checkpoint to write.
    """

    def __init__(self, last: Path) -> None:
        self.last = last
        self.asked: str | None = None  # the signal that came
        self.cut: str | None = None  # why the run was cut, once all ranks have agreed and saved
        self._waits = False
        self._process = os.getpid()

    # -- signals ------------------------------------------------------------------------------------------------------

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals as asked to end; an ignored one (``nohup``) stays ignored."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        self._taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
        self._listen()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _listen(self) -> None:
        for number in self._taken:
            signal.signal(number, self._on_signal)

    _taken: list[signal.Signals] = []  # noqa: RUF012  # none outside ``listening``

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a data worker inherits this, and is ended by the process that made it
            return
        again, self.asked = self.asked is not None, signal.Signals(number).name
        if again or not self._waits:
            raise KeyboardInterrupt
        # Not print: it may be in the middle of printing.
        os.write(2, f"\n{self.asked}: saving after this batch, then ending; once more ends at once\n".encode())

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, a signal ends the run without a save: what was worth saving has been saved."""
        if self.asked is not None:
            raise KeyboardInterrupt
        before, self._waits = self._waits, False
        try:
            yield
        finally:
            self._waits = before

    # -- hooks --------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()  # Lightning has put its own SIGTERM handler in front, which saves nothing

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._waits = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._waits = True  # a run resumed inside an epoch starts with no epoch

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        early = trainer.should_stop and trainer.fit_loop._can_stop_early and not _stopped_early(trainer)
        wanted = self.asked is not None or (early and not at_planned_end(trainer))
        if trainer.strategy.reduce_boolean_decision(wanted, all=False):
            self.cut = self.asked or (_limit(trainer) if early else "a signal to another process")
            self._save(trainer)
            raise RunCut

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not any(_saves_epochs(callback, self.last) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._waits = False
        if not is_finished(trainer):
            self.cut = _limit(trainer)
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            trainer.save_checkpoint(self.last, weights_only=False)


@contextmanager
def may_end_at_once(trainer: Trainer) -> Iterator[None]:
    """Inside, a signal ends the run at once, if it has a ``Stopper``; for what is long and loses nothing."""
    stopper = next((c for c in trainer.callbacks if isinstance(c, Stopper)), None)  # type: ignore[attr-defined]
    if stopper is None:
        yield
        return
    with stopper.at_once():
        yield


def last_checkpoint(trainer: Trainer) -> Path | None:
    """The file that a run with a ``Stopper`` resumes from."""
    return next((c.last for c in trainer.callbacks if isinstance(c, Stopper)), None)  # type: ignore[attr-defined]


def forget_time(trainer: Trainer) -> None:
    """Give a resumed run the whole of ``max_time`` again: Lightning restores how much an earlier session has used."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Timer):
            callback.load_state_dict({})


def is_finished(trainer: Trainer) -> bool:
    """Whether a fit has come to its planned end, or to one that ``EarlyStopping`` has chosen."""
    return at_planned_end(trainer) or _stopped_early(trainer)


def at_planned_end(trainer: Trainer) -> bool:
    """Whether ``max_steps`` or ``max_epochs`` are reached; also in the hooks after the last batch of an epoch."""
    loop = trainer.fit_loop
    if loop.max_steps not in (None, -1) and trainer.global_step >= loop.max_steps:
        return True
    progress: Any = loop.epoch_progress.current
    ended = progress.processed + (trainer.is_last_batch and progress.ready > progress.processed)
    return loop.max_epochs not in (None, -1) and ended >= loop.max_epochs


def _limit(trainer: Trainer) -> str:
    """What has set ``should_stop``."""
    timers = [callback for callback in trainer.callbacks if isinstance(callback, Timer)]  # type: ignore[attr-defined]
    left = [seconds for timer in timers if (seconds := timer.time_remaining()) is not None]
    return "trainer.max_time" if any(seconds <= 0 for seconds in left) else "a callback"


def _stopped_early(trainer: Trainer) -> bool:
    callbacks = trainer.early_stopping_callbacks
    return any(isinstance(c, EarlyStopping) and c.stopping_reason != EarlyStoppingReason.NOT_STOPPED for c in callbacks)


def _saves_epochs(callback: Callback, last: Path) -> bool:
    """Whether a callback writes ``last`` at every epoch's end by itself."""
    if isinstance(callback, ModelCheckpoint):
        place = Path(callback.dirpath or "") / f"{callback.filename}{callback.FILE_EXTENSION}"
        return bool(callback._save_on_train_epoch_end) and callback._every_n_epochs == 1 and place == last
    return getattr(callback, "saves_epochs", False)
