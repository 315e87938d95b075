"""Functions of where training stands: coefficients and weights that change with the step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_lightning.types import StepContext

Schedule = Callable[[StepContext], float]


def make_constant(value: float) -> Schedule:
    """A schedule that always returns ``value``."""
    return lambda ctx: value


def warmup_cosine(step: int, *, warmup_steps: int, total_steps: int, final_fraction: float = 0.0) -> float:
    """Learning-rate factor after ``step`` optimizer steps: linear up to 1, then a half cosine to ``final_fraction``.

    The first step already moves: step ``s`` of the warm-up uses ``(s + 1) / (warmup_steps + 1)``.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return final_fraction + (1.0 - final_fraction) * 0.5 * (1.0 + math.cos(math.pi * progress))


def decay_weights(num_slots: int, decay: float | None) -> Float[Tensor, " Kp"]:
    """``exp(-j / decay)`` for predicting slots ``j = 0 .. num_slots - 1``: the first predicted slot weighs 1.

    DFlash (arXiv 2602.06036 sec. 4.2) writes ``exp(-(k-1)/gamma)`` for slots ``k = 1 ..``. ``None`` means no decay.
    """
    if decay is None:
        return torch.ones(num_slots)
    return torch.exp(-torch.arange(num_slots, dtype=torch.float32) / decay)
