"""What the plan of batches, and a batch on its way to the device, must know of the trainer."""

from __future__ import annotations

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from dflash_lightning.data.batch.loader import StatefulLoader, map_tensors
from dflash_lightning.data.batch.packing import Planner
from dflash_lightning.device import abilities
from dflash_lightning.errors import SettingError
from dflash_lightning.types import TrainBatch


def accumulation(trainer: Trainer | None) -> int:
    """Micro-batches per optimizer step; 1 without a trainer.

    Raises:
        SettingError: it changes during the run.
    """
    if trainer is None:
        return 1
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
        raise SettingError(
            "trainer.callbacks",
            "GradientAccumulationScheduler changes the accumulation during the run, which the plan of "
            "batches cannot follow",
            "Use a constant trainer.accumulate_grad_batches",
        )
    return trainer.accumulate_grad_batches


def batch_limit(trainer: Trainer | None, planner: Planner) -> int | None:
    """Micro-batches per epoch that Lightning will run, where ``limit_train_batches`` says fewer than all."""
    if trainer is None:
        return None
    limit = trainer.limit_train_batches
    length = -(-planner.num_micro_batches // trainer.world_size)
    return min(length, limit if isinstance(limit, int) else int(length * limit))


def check_begin(loader: StatefulLoader | None, trainer: Trainer | None) -> None:
    """Hold the loader's position against Lightning's, before a batch is trained on.

    Raises:
        SettingError: see ``PlanSampler.begin``.
    """
    if loader is not None and trainer is not None:
        loader.sampler.begin(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def pinned(batch: TrainBatch, trainer: Trainer | None) -> TrainBatch:
    """The batch in pinned memory, where copies to the trainer's device then do not wait for what it is doing."""
    if trainer is None or not abilities(trainer.strategy.root_device).pins:
        return batch
    return map_tensors(batch, torch.Tensor.pin_memory)
