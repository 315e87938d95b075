"""What is said when memory has run out: what takes most of it by the formula, and which setting makes that smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import walk_tb

import torch

from dflash_lightning.model.memory import StepMemory

_WORDS = ("can't allocate memory", "out of memory", "cublas_status_alloc_failed")  # as torch's allocators say it
_DECODING = "/dflash_lightning/decoding/"
_FEWER_PROMPTS = "It was decoding prompts: use a smaller decoding.batch_size, or a smaller decoding.max_new_tokens"


def ran_out(error: BaseException) -> bool:
    """Whether ``error`` says that memory is at its end: that of a GPU, or main memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS)


@contextmanager
def explained(memory: Callable[[], StepMemory | None]) -> Iterator[None]:
    """Where memory runs out inside, say what to do; ``memory`` is what a step needs, null where that is not known.

    Raises:
        ValueError: in place of the allocator's error.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"out of memory: {_advice(error, memory())}.\n  ({said[0]})") from error


def _advice(error: BaseException, memory: StepMemory | None) -> str:
    frames = walk_tb(error.__traceback__)
    if any(_DECODING in frame.f_code.co_filename.replace("\\", "/") for frame, _ in frames):
        return _FEWER_PROMPTS
    if memory is None:
        return "there is not enough of it for target and drafter. Use target.dtype=bfloat16, or a smaller target"
    return memory.advice()
