"""What training logs: means over the steps between two written ones, speed and memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_lightning.device import peak_bytes
from dflash_lightning.loss import LossShare
from dflash_lightning.ops.clock import DeviceSeconds
from dflash_lightning.ops.lm_head import Argmax, View
from dflash_lightning.types import BlockLayout


class WindowMeans:
    """Means over the optimizer steps since the last written one, so that a written loss is not that of one step.

    Tensors stay on the device: nothing here waits for it.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._steps = 0

    def add(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take one step's values in; the means so far."""
        self._steps += 1
        for name, value in values.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value.clone()
        return {name: self._sums[name] / self._steps for name in values}

    def begin(self) -> None:
        """The step just taken in is written: start a new window."""
        self._sums, self._steps = {}, 0


class Throughput:
    """Tokens and blocks per second of training between two written steps; evaluations are left out of the time.

    ``reading`` is the clock of the target's passes: on the device they take a share of that time, beside the steps
    where they are made ahead.
    """

    def __init__(self, reading: DeviceSeconds) -> None:
        self._counts: dict[str, Tensor] = {}
        self._reading = reading
        self._reading.take()
        self._since = time.monotonic()

    def add(self, **counts: Float[Tensor, ""]) -> None:
        """Count what an optimizer step has trained on over all ranks: ``tokens`` without padding, ``blocks``."""
        for name, count in counts.items():
            self._counts[name] = self._counts[name] + count if name in self._counts else count

    def leave_out(self, seconds: float) -> None:
        """``seconds`` since the last written step were spent on something else."""
        self._since += seconds

    def take(self) -> dict[str, Tensor | float]:
        """What is logged of the time since the last call, or since it was made: figures of shape []."""
        now = time.monotonic()
        seconds, self._since = max(now - self._since, 1e-9), now
        counts, self._counts = self._counts, {}
        found: dict[str, Tensor | float] = {f"train/{name}_per_second": n / seconds for name, n in counts.items()}
        found["train/target_share"] = min(1.0, self._reading.take() / seconds)
        return found


class StepLog:
    """Collects the micro-batches of an optimizer step, then says what is logged of it.

    Losses and the gradients' norm are means over the steps since the last written one; accuracy, which costs a pass of
    its own, is of the written step alone. Sums over micro-batches and ranks come first, so no split changes a number.
    """

    def __init__(self, reading: DeviceSeconds | None = None) -> None:
        self.throughput = Throughput(DeviceSeconds() if reading is None else reading)
        self._sums: dict[str, Tensor] = {}
        self._means = WindowMeans()
        self._first_slot: Tensor | None = None

    def add(self, name: str, value: Tensor) -> None:
        """Add a micro-batch's share of a figure; of any shape, the same at every call."""
        value = value.detach()
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def add_share(self, name: str, share: LossShare) -> None:
        """Add what the loss term ``name`` comes to in a micro-batch, and its further figures."""
        self.add(f"train/loss/{name}", share.value)
        for figure, value in share.figures.items():
            self.add(f"train/{figure}/{name}", value)

    @torch.no_grad()
    def count_correct(self, view: View, layout: BlockLayout) -> None:
        """Count right guesses by slot; for steps that are written."""
        (guess,) = view.ask(Argmax())
        self.add("correct", ((guess == layout.labels) & layout.scored).sum((0, 1)).float())
        self.add("scored", layout.scored.sum((0, 1)).float())

    def reduce(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The step's sums over all ranks, flat, in one collective of shape [Q]; every rank must call this."""
        names = sorted(self._sums)
        sizes = [self._sums[name].numel() for name in names]
        vector = sum_over_ranks(torch.cat([self._sums[name].flatten() for name in names]))
        self._sums = {}
        return dict(zip(names, vector.split(sizes), strict=True))

    def figures(self, reduced: dict[str, Tensor], norm: Tensor, rate: float, first: int) -> dict[str, Tensor | float]:
        """What is logged of a step, all of shape []: its sums, gradient norm and learning rate.

        ``reduced`` is what ``reduce`` returned, ``norm`` a scalar; slots predict from ``first`` on.
        """
        correct, scored = reduced.pop("correct", None), reduced.pop("scored", None)
        self.throughput.add(**{name: reduced.pop(name).squeeze() for name in ("tokens", "blocks")})
        values = {name: value.squeeze() for name, value in reduced.items()} | {"train/grad_norm": norm}
        found: dict[str, Tensor | float] = {**self._means.add(values)}
        if correct is None or scored is None:
            return found
        self._means.begin()
        found["train/lr"] = rate
        found |= self.throughput.take()
        found["train/memory_gib"] = memory_gib(norm.device)
        found["train/accuracy"] = correct.sum() / scored.sum().clamp(min=1)
        for slot in range(first, len(correct)):
            found[f"train/accuracy/slot_{slot - first + 1}"] = correct[slot] / scored[slot].clamp(min=1)
        pair = torch.stack([correct[first], scored[first]])
        self._first_slot = pair if self._first_slot is None else self._first_slot + pair
        return found

    def take_first_slot(self) -> tuple[int, int]:
        """First drafts that were right, and all of them, in the written steps since the last call, over all ranks."""
        right, counted = (0, 0) if self._first_slot is None else self._first_slot.tolist()
        self._first_slot = None
        return int(right), int(counted)


def memory_gib(device: torch.device) -> float:
    """The most that this process has held so far, GiB: on the GPU that it trains on, else in main memory."""
    peak = peak_bytes(device)
    if peak is not None:
        return peak / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
