"""Corrections of how Lightning resumes: a run that is cut anywhere goes on as if it had not been."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.loop import _Loop


class ExactResume(Callback):
    """Resumes at the start of the next epoch, or of the accumulation window, that the checkpoint was written in.

    *Inside a window* the gradients so far are in no checkpoint; Lightning would step with what is left of the window.
    Its ``ModelCheckpoint`` writes such checkpoints: with ``every_n_train_steps`` after a resumed run's first
    micro-batch, with ``train_time_interval`` and on exceptions anywhere. The window is trained again from its start.

    *Where* ``max_steps`` *ended the run inside an epoch*, Lightning counts that epoch as done: a run that is made
    longer would leave out the rest of it. It is taken as not done yet.

    *At the end of an epoch* (a checkpoint written in ``on_train_epoch_end``) and with ``max_steps`` set, Lightning
    (2.6.6) believes to be inside the finished epoch, trains a single batch and ends it again. Without ``max_steps`` it
    starts the next epoch, and this makes it do so always.

    ``DraftData`` adds it to the trainer; ``tests/data/test_resume.py`` and ``tests/training/test_resume.py`` fail
    without it.
    """

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        loop = checkpoint["loops"]["fit_loop"]
        (position,), progress = loop["state_dict"]["combined_loader"], loop["epoch_loop.batch_progress"]
        epochs = loop["epoch_progress"]
        if position["yielded"] and epochs["current"]["processed"] > position["epoch"]:
            for counts in (epochs["current"], epochs["total"]):
                counts["processed"] = counts["started"] - 1
                counts["completed"] = min(counts["completed"], counts["processed"])
        behind = position["yielded"] % trainer.accumulate_grad_batches
        if behind == 0 or progress["is_last_batch"]:  # the last window of an epoch may be shorter
            return
        position["yielded"] -= behind
        trainer.datamodule.load_state_dict({"train": position})  # type: ignore[attr-defined]
        again = progress["current"]["ready"] - position["yielded"]
        for counts in (progress["current"], progress["total"]):
            counts.update(dict.fromkeys(counts, counts["ready"] - again))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = trainer.fit_loop
        if not loop.restarted_on_epoch_end:
            return
        loop.epoch_progress.increment_completed()
        loop.reset_restart_stage()
        _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]
