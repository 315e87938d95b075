"""Curves through measured times: rising ones, and rising convex ones, by least squares."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def rising(values: Sequence[float | int]) -> list[float]:
    """The sequence that never falls and lies nearest to ``values`` (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []  # mean and length
    for value in values:
        mean, length = float(value), 1
        while blocks and blocks[-1][0] > mean:
            before, count = blocks.pop()
            mean, length = (before * count + mean * length) / (count + length), count + length
        blocks.append((mean, length))
    return [mean for mean, length in blocks for _ in range(length)]


def rising_convex(places: Sequence[float | int], values: Sequence[float | int]) -> list[float]:
    """The convex function that never falls and lies nearest to ``values`` at rising ``places``, at these places.

    Such a function is a constant and hinges at the places but the last, with weights that are not negative.
    """
    x = torch.tensor(places, dtype=torch.float64)
    x = (x - x[0]) / (x[-1] - x[0]).clamp_min(1e-12)
    hinges = (x[:, None] - x[:-1]).clamp_min(0.0)
    columns = torch.cat([torch.ones(len(x), 1, dtype=x.dtype), hinges], dim=1)
    found: list[float] = (columns @ not_negative(columns, torch.tensor(values, dtype=x.dtype))).tolist()
    return found


def not_negative(columns: Float[Tensor, "n k"], values: Float[Tensor, " n"]) -> Float[Tensor, " k"]:
    """Weights of 0 or more with which ``columns`` come nearest to ``values`` (Lawson and Hanson 1974, chapter 23)."""
    weights = torch.zeros(columns.shape[1], dtype=columns.dtype)
    used = torch.zeros(columns.shape[1], dtype=torch.bool)
    small = 1e-12 * float(columns.abs().max() * values.abs().max() + 1e-30)
    for _ in range(3 * columns.shape[1]):
        gain = (columns.T @ (values - columns @ weights)).masked_fill(used, -torch.inf)
        if float(gain.max()) <= small:
            break
        used[int(gain.argmax())] = True
        while bool(used.any()):
            wanted = torch.zeros_like(weights)
            wanted[used] = torch.linalg.lstsq(columns[:, used], values[:, None]).solution[:, 0]
            bad = used & (wanted <= 0.0)
            if not bool(bad.any()):
                weights = wanted
                break
            share = (weights / (weights - wanted).clamp_min(1e-300))[bad].min()
            weights = weights + share * (wanted - weights)
            used &= weights > 1e-14
            weights = weights * used
    return weights
