"""How the learning rate changes with the step, and how a slot's weight changes with its place in the block."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def warmup_cosine(step: int, *, warmup_steps: int, total_steps: int, final_fraction: float = 0.0) -> float:
    """Learning-rate factor after ``step`` optimizer steps: linear up to 1, then a half cosine to ``final_fraction``.

    The first step already moves: step ``s`` of the warm-up uses ``(s + 1) / (warmup_steps + 1)``.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return final_fraction + (1.0 - final_fraction) * 0.5 * (1.0 + math.cos(math.pi * progress))


def fade(step: int, total_steps: int, *, start: float = 1.0, until: float = 1.0) -> float:
    """``start (1 - step / (until * total_steps))``, cut to 0..1: it falls in a straight line and then stays 0."""
    return min(1.0, max(0.0, start * (1.0 - step / max(until * total_steps, 1e-9))))


def decay_weights(num_slots: int, decay: float | None, *, device: torch.device | None = None) -> Float[Tensor, " Kp"]:
    """``exp(-j / decay)`` for predicting slots ``j = 0 .. num_slots - 1``: the first predicted slot weighs 1.

    DFlash (arXiv 2602.06036 sec. 4.2) writes ``exp(-(k-1)/gamma)`` for slots ``k = 1 ..``. ``None`` means no decay.
    Made on ``device``, so that a training step on a GPU need not wait for a copy.
    """
    if decay is None:
        return torch.ones(num_slots, device=device)
    return torch.exp(-torch.arange(num_slots, dtype=torch.float32, device=device) / decay)
