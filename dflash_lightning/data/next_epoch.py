"""A correction of how Lightning resumes at the end of an epoch."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.loop import _Loop


class StartNextEpoch(Callback):
    """Starts the next epoch when a run is resumed from a checkpoint that was written in ``on_train_epoch_end``.

    With ``max_steps`` set, Lightning (2.6.6) believes to be inside the finished epoch, trains a single batch and ends
    it again. Without ``max_steps`` it starts the next epoch, and this makes it do so always. ``DraftData`` adds it to
    the trainer; ``tests/data/test_resume.py`` fails without it.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = trainer.fit_loop
        if not loop.restarted_on_epoch_end:
            return
        loop.epoch_progress.increment_completed()
        loop.reset_restart_stage()
        _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]
