"""What the code may know of a device: the one place that asks which kind of device it is.

Everything else asks for an ability by its name. So whatever a GPU switches on can be switched on for another device
too: the tests do that for one that does not exist.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True)
class Abilities:
    """What differs between devices.

    ``queues``: work is put into a queue and the program runs ahead, so that reading one number waits for all of it.
    ``own_kernels``: weights are laid out anew, and kernels are written, for this device: it is the CPU.
    ``flex``: ``flex_attention`` runs there with gradients, compiled.
    ``pins``: a copy from pinned host memory does not wait for the queue.
    ``events``: the queue can be marked, a mark be waited for, and the time between two be read.
    ``measures``: it counts the memory that its tensors take.
    ``streams``: it has further queues, and what is put into one runs beside what is in the others.
    """

    queues: bool = True
    own_kernels: bool = False
    flex: bool = False
    pins: bool = False
    events: bool = False
    measures: bool = False
    streams: bool = False


_KNOWN = {
    "cpu": Abilities(queues=False, own_kernels=True),
    "cuda": Abilities(flex=True, pins=True, events=True, measures=True, streams=True),
}
_OTHER = Abilities()  # the least that any accelerator can do


def abilities(device: torch.device) -> Abilities:
    """What ``device`` can do; of a kind that is not known here, what all can."""
    return _KNOWN.get(device.type, _OTHER)


def send(values: Tensor, device: torch.device) -> Tensor:
    """``values``, of any shape on the CPU, on ``device``: without a wait for the queue where there is one."""
    able = abilities(device)
    if not able.queues:
        return values.to(device)
    return (values.pin_memory() if able.pins else values).to(device, non_blocking=True)


def send_list(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of ``values``, shaped as they are, on ``device``; ``torch.tensor(values, device=device)`` would wait."""
    return send(torch.tensor(values, dtype=dtype), device)


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if abilities(device).queues:
        torch.accelerator.synchronize(device)


def wait_for_gpu() -> None:
    """Until the GPU in use, if there is one, has done what it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@runtime_checkable
class Mark(Protocol):
    """A place in the queue of a device."""

    def synchronize(self) -> None:
        """Wait until the device has come here."""

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds between this mark and a later one, both of which the device has passed."""


def mark(device: torch.device, *, timed: bool = False) -> Mark | None:
    """A mark behind the work given so far; null where there is no queue to mark."""
    if not abilities(device).events:
        return None
    event = torch.get_device_module(device).Event(enable_timing=timed)
    event.record()
    made: Mark = event
    return made


def gpu_mark() -> Mark | None:
    """A timed mark in the queue of the GPU in use; null where there is none."""
    return mark(torch.device("cuda"), timed=True) if torch.cuda.is_initialized() else None


class SideQueue:
    """A second queue of a device that has ``streams``, beside the main one, to which the program's own work goes.

        main   step 1 | step 2 | waits for B, step 3
        side          | A, B   |

    What the side begins finds done what the main queue held. What it makes is handed over: until then nothing may read
    it in the main queue.
    """

    def __init__(self, device: torch.device) -> None:
        assert abilities(device).streams, f"{device} has one queue only"
        self._device = device
        self._module = torch.get_device_module(device)
        self._side = self._module.Stream(device)

    @contextmanager
    def behind_main(self) -> Iterator[None]:
        """What is given in here goes to this queue, and begins when what the main one was given so far is done."""
        self._side.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._side):
            yield

    def mark(self) -> Any:
        """A mark behind what this queue was given so far, for ``hand_over``."""
        return self._side.record_event()

    def hand_over(self, mark: Any, tensors: Iterable[Tensor]) -> None:
        """Let the main queue go on when the side has passed ``mark``; the program does not wait.

        ``tensors``, of any shape, were made in the side queue, to which their memory goes back when they are dropped.
        The allocator is told not to give it away before the main queue is done with it.
        """
        main = self._module.current_stream(self._device)
        main.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(main)


def peak_bytes(device: torch.device) -> int | None:
    """The most that tensors of this process have taken on ``device``; null where it does not count that."""
    if not abilities(device).measures:
        return None
    return int(torch.get_device_module(device).max_memory_allocated(device))


def begin_peak(device: torch.device) -> int | None:
    """Count the peak anew from here; the bytes that are held now, null where they are not counted."""
    if not abilities(device).measures:
        return None
    module = torch.get_device_module(device)
    module.reset_peak_memory_stats(device)
    return int(module.memory_allocated(device))


# -- the GPUs of this machine -----------------------------------------------------------------------------------------


def has_gpu() -> bool:
    """Whether CUDA can be used here."""
    return torch.cuda.is_available()


def use_gpu(number: int) -> None:
    """Run on this GPU whatever names none."""
    torch.cuda.set_device(number)


def gpu_of_rank() -> str:
    """The GPU of this process, before it has used any: that of its number among the processes of its machine."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def best_device() -> str:
    """Where to run unless told otherwise."""
    return "cuda" if has_gpu() else "cpu"


def trains_on_cpu(accelerator: Any) -> bool:
    """Whether Lightning trains on the CPU with this setting of ``trainer.accelerator``."""
    if accelerator == "auto":
        return not has_gpu() and not torch.backends.mps.is_available()
    return bool(accelerator == "cpu")


def gpu_name() -> str | None:
    """What the GPU of this process is called; null without one."""
    return torch.cuda.get_device_name() if has_gpu() else None


def num_gpus() -> int:
    """How many GPUs CUDA sees."""
    return int(torch.cuda.device_count())
