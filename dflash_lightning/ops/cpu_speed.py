"""Whether this CPU computes in bfloat16, measured: processors that lack it imitate it, up to 60 times slower."""

from __future__ import annotations

import time
from functools import cache

import torch
from torch import Tensor

_SIDE = 256  # of the square factors: about 2 ms in float32, and 30 ms where bfloat16 is imitated
_ROUNDS = 8
_SLOW = 2.0  # bfloat16 that takes more than this many times as long as float32 is imitated
_FAST = 0.8  # below this it is worth its rounding; processors that have it take half as long


def bfloat16_is_slow() -> bool:
    """Whether a product in bfloat16 takes more than twice as long as in float32 on this CPU."""
    return bfloat16_ratio() > _SLOW


def bfloat16_is_fast() -> bool:
    """Whether a product in bfloat16 takes clearly less time than in float32 on this CPU."""
    return bfloat16_ratio() < _FAST


@cache
def bfloat16_ratio() -> float:
    """Seconds of a product in bfloat16 over those in float32.

    Measured once per process, within half a second. It draws no random numbers.
    """
    return _seconds(torch.bfloat16) / _seconds(torch.float32)


def _seconds(dtype: torch.dtype) -> float:
    """CPU-seconds of the shortest of a few products in one thread.

    A busy machine must not decide how a run trains: threads that wait for one another, and time in which other
    processes run, do not count.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            factor = torch.linspace(-1.0, 1.0, _SIDE * _SIDE, device="cpu").view(_SIDE, _SIDE).to(dtype)
            _product(factor[:32, :32].contiguous())  # the library's own start
            return min(_product(factor) for _ in range(_ROUNDS))
    finally:
        torch.set_num_threads(threads)


def _product(factor: Tensor) -> float:
    begin = time.thread_time()
    factor @ factor
    return time.thread_time() - begin
