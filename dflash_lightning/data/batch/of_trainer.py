"""What the plan of batches, and a batch on its way to the device, must know of the trainer."""

from __future__ import annotations

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from dflash_lightning.data.batch.loader import PlanSampler, StatefulLoader, map_tensors
from dflash_lightning.data.batch.packing import Planner
from dflash_lightning.device import abilities
from dflash_lightning.errors import SettingError
from dflash_lightning.types import TrainBatch


def make_sampler(planner: Planner, trainer: Trainer | None) -> PlanSampler:
    """This process's share of the plan: all of it without a trainer."""
    return PlanSampler(
        planner,
        rank=0 if trainer is None else trainer.global_rank,
        world=1 if trainer is None else trainer.world_size,
        accumulate=accumulation(trainer),
        limit=batch_limit(trainer, planner),
    )


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


def follows(sampler: PlanSampler, trainer: Trainer) -> bool:
    """Whether Lightning will ask for another micro-batch of this epoch after the one that is handed out next.

    A run that is stopped early asks for fewer.
    """
    after = sampler.yielded + 1
    if after >= sampler.limit:
        return False
    last_step = trainer.max_steps != -1 and trainer.global_step + 1 >= trainer.max_steps
    return not (last_step and after % sampler.accumulate == 0)


def pinned(batch: TrainBatch, trainer: Trainer | None) -> TrainBatch:
    """The batch in pinned memory, where copies to the trainer's device then do not wait for what it is doing."""
    if trainer is None or not abilities(trainer.strategy.root_device).pins:
        return batch
    return map_tensors(batch, torch.Tensor.pin_memory)
