"""The optimizer's settings, and a learning rate that goes on smoothly where a run's length has changed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash_lightning.errors import SettingError
from dflash_lightning.schedule import warmup_cosine

_LEAST_RISE = 0.02  # of the steps that are left, after the length of a run has changed


@dataclass(frozen=True)
class LengthChange:
    """A run went on with another number of steps than it was begun with.

    ``step`` steps had been made by then, and the old plan had ``factor`` for the next one (0 where it was at its end).
    """

    step: int
    factor: float


@dataclass(frozen=True)
class OptimSettings:
    """AdamW with linear warm-up and a half cosine; every length is counted in optimizer steps.

    ``warmup_steps`` wins over ``warmup_fraction`` (of all optimizer steps) when it is given.
    """

    lr: float  # the highest learning rate
    betas: tuple[float, float] = (0.9, 0.999)  # of AdamW's running means
    weight_decay: float = 0.0  # of AdamW
    warmup_fraction: float = 0.04  # of all optimizer steps
    warmup_steps: int | None = None  # optimizer steps; null goes by warmup_fraction
    final_fraction: float = 0.0  # of lr that is left at the last step

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise SettingError(
                "optim.lr", f"{self.lr} does not move the weights", "Use a positive number, such as 6e-4"
            )
        if not 0 <= self.warmup_fraction < 1:
            raise SettingError(
                "optim.warmup_fraction",
                f"{self.warmup_fraction} is not a share of the run",
                "Use 0 <= fraction < 1, or set optim.warmup_steps to count optimizer steps",
            )

    def factor(self, step: int, total_steps: int, change: LengthChange | None = None) -> float:
        """Learning-rate factor of optimizer step ``step`` (0-based) of ``total_steps``.

        After a ``change`` of the run's length it rises (or falls) in a line from where the old plan stood to the curve
        of a run that had ``total_steps`` from the start, in as many steps as a warm-up of the steps that are left, and
        then follows that curve. So no step has rate 0, none jumps, and none goes above what such a run would have.
        """
        planned = warmup_cosine(
            step,
            warmup_steps=self._warmup(total_steps),
            total_steps=total_steps,
            final_fraction=self.final_fraction,
        )
        if change is None or step < change.step:
            return planned
        left = total_steps - change.step
        rise = max(self._warmup(left), math.ceil(_LEAST_RISE * left))
        share = min(1.0, (step - change.step + 1) / (rise + 1))
        return change.factor + (planned - change.factor) * share

    def _warmup(self, total_steps: int) -> int:
        return self.warmup_steps if self.warmup_steps is not None else math.ceil(self.warmup_fraction * total_steps)

    def make_optimizer(self, parameters: Iterable[nn.Parameter], *, scaled: bool) -> torch.optim.AdamW:
        """AdamW in one fused pass (3x faster on a CPU); ``scaled`` gradients (float16) need the plain one.

        A fused optimizer takes the scale off by itself, inside its step: too late for clipping.
        """
        return torch.optim.AdamW(
            list(parameters), lr=self.lr, betas=self.betas, weight_decay=self.weight_decay, fused=not scaled
        )


def length_change(
    optim: OptimSettings, total_steps: int, scheduler: dict[str, Any], earlier: LengthChange | None
) -> LengthChange | None:
    """The change that a resumed run goes on with: ``earlier`` if its length is what it was, else one that begins now.

    ``scheduler`` is the state of the learning-rate scheduler in the checkpoint: it holds the rate that the old plan
    had for the next step.
    """
    step, factor = scheduler["last_epoch"], scheduler["_last_lr"][0] / scheduler["base_lrs"][0]
    now = optim.factor(step, total_steps, earlier)
    return earlier if math.isclose(now, factor, rel_tol=1e-6, abs_tol=1e-9) else LengthChange(step, factor)


def set_rates(schedules: Iterable[Any]) -> None:
    """Give the next step its learning rate: a checkpoint restores the rate that the run's earlier length had."""
    for schedule in schedules:
        assert isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
        groups = zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True)
        for group, base, factor in groups:
            group["lr"] = base * factor(schedule.last_epoch)


def gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The gradients that its next step will use, each of its parameter's shape."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
