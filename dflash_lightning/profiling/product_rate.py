"""How fast this machine multiplies the matrices that occur: what the rate of a whole step is held against."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_lightning.ops.clock import now
from dflash_lightning.profiling.build import Place
from dflash_lightning.profiling.work import Product, Work

_TRIES = 3  # the shortest counts


def product_seconds(work: Work, place: Place) -> dict[str, float]:
    """Seconds by stage that ``work`` would take if nothing but its products were computed.

    Every product of two matrices is measured by itself, on matrices of its shape. The small products inside attention
    are taken to run at the rate of all others together. Seconds are CPU-seconds on a CPU, so that other programs do not
    count, and those of the clock elsewhere.
    """
    measured = {key: _seconds(*key, place) for key in dict.fromkeys(map(_key, work.products))}
    found = dict.fromkeys(work.by_stage(), 0.0)
    for product in work.products:
        found[product.stage] += measured[_key(product)] * product.times
    rate = sum(product.flop for product in work.products) / max(sum(found.values()), 1e-12)
    for stage, flop in work.attention.items():
        found[stage] += flop / rate
    return found


def _key(product: Product) -> tuple[str, int, int, int]:
    return product.kind, product.rows, product.inner, product.outer


@torch.no_grad()
def _seconds(kind: str, rows: int, inner: int, outer: int, place: Place) -> float:
    def filled(height: int, width: int) -> Tensor:
        return torch.empty(height, width, dtype=place.dtype, device=place.device).uniform_(-1.0, 1.0)

    x, weight, gradient = filled(rows, inner), filled(outer, inner), filled(rows, outer)
    makers = {"forward": lambda: x @ weight.t(), "input": lambda: gradient @ weight, "weight": lambda: gradient.t() @ x}
    found = []
    for _ in range(_TRIES + 1):  # the first one warms up
        begin = now()[place.clock]
        makers[kind]()
        found.append(now()[place.clock] - begin)
    return min(found[1:])
