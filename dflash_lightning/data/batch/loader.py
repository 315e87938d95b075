"""A loader that can stop after any micro-batch and go on from there, in this process or in the next one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from dflash_lightning.data.batch.collate import BatchMaker, WindowItem
from dflash_lightning.data.batch.packing import Planner, rank_share, window_bounds
from dflash_lightning.errors import SettingError
from dflash_lightning.types import TrainBatch


class PlanSampler(Sampler[WindowItem]):
    """Accumulation windows of one rank, from where the loader stands to the end of the epoch.

    The epoch travels to the workers inside the items, so they hold no state. ``yielded`` counts micro-batches.
    """

    def __init__(
        self, planner: Planner, *, rank: int = 0, world: int = 1, accumulate: int = 1, limit: int | None = None
    ) -> None:
        self.planner = planner
        self.rank = rank
        self.world = world
        self.accumulate = accumulate
        self.length = -(-planner.num_micro_batches // world)
        self.limit = self.length if limit is None else limit
        self.epoch = 0
        self.yielded = 0
        self.of_another_plan = False

    def go_to(self, epoch: int, yielded: int, *, of_another_plan: bool) -> None:
        """Stand where a checkpoint says: one of another plan stands at the start of an epoch."""
        self.epoch, self.yielded, self.of_another_plan = epoch, yielded, of_another_plan

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning before every epoch; a position restored for this very epoch stays."""
        if epoch != self.epoch:
            self.epoch, self.yielded = epoch, 0

    def begin(self, done: int) -> None:
        """Told before a batch is trained on how many of its epoch Lightning counts as done.

        Raises:
            SettingError: the checkpoint was written right after the last micro-batch of an epoch that is longer now:
                Lightning believes to be inside it, and would leave out as many micro-batches of the next one.
        """
        if self.of_another_plan and done:
            raise _inside(self.epoch - 1, "the last micro-batch")
        self.of_another_plan = False

    def advance(self) -> None:
        """Count one micro-batch as handed out; after the last one stand at the start of the next epoch."""
        self.yielded += 1
        if self.yielded == self.length:
            self.epoch, self.yielded = self.epoch + 1, 0

    def __len__(self) -> int:
        return self.length

    def documents(self) -> Iterator[int]:
        """The documents of the micro-batches that are left of the epoch, in the order in which these hold them."""
        for item in self:
            yield from (d for batch in item.micro_batches[item.first :] for pack in batch for d in pack)

    def __iter__(self) -> Iterator[WindowItem]:
        epoch, done = self.epoch, self.yielded
        share = rank_share(self.planner.epoch(epoch), self.rank, self.world)
        for window, (start, stop) in enumerate(window_bounds(self.length, self.accumulate, self.limit)):
            if stop > done:
                yield WindowItem(epoch, window, max(0, done - start), tuple(share[start:stop]))


class WindowDataset(Dataset[Any]):
    """Runs in the workers: makes the micro-batches of a window."""

    def __init__(self, maker: BatchMaker) -> None:
        self.maker = maker

    def __getitem__(self, item: WindowItem) -> list[TrainBatch]:
        batches = self.maker.window(item)
        if get_worker_info() is None:
            return batches
        # Tensors cross processes through shared memory and a file descriptor each: containers have 64 MB of the former
        # and 1024 of the latter. Arrays go through the pipe; ids are small.
        return [map_tensors(batch, lambda tensor: tensor.numpy()) for batch in batches]


class StatefulLoader:
    """Iterates over the micro-batches of one epoch, starting where its state says. Not a ``DataLoader``, but holds one.

    ``state_dict`` is ``{epoch, yielded}`` (and a digest of the plan), counted when a batch is handed out in the main
    process, so batches that workers prepared ahead do not count. Iterating is lazy up to the first batch, because
    Lightning makes the iterator before it calls ``sampler.set_epoch``. ``len`` is the full epoch, wherever it stands.
    Lightning leaves a loader that is no ``DataLoader`` alone, so ``use_distributed_sampler`` cannot replace the plan.
    ``expect`` hears of the documents that will come whenever iterating begins. ``ahead`` makes of the micro-batches
    what is handed out, one for one; it may take them before it hands them out.
    """

    batch_sampler = None  # Lightning reads it wherever there is a ``sampler``

    def __init__(
        self,
        maker: BatchMaker,
        sampler: PlanSampler,
        *,
        num_workers: int = 0,
        expect: Callable[[Iterator[int]], None] | None = None,
        ahead: Callable[[Iterator[TrainBatch]], Iterator[TrainBatch]] | None = None,
    ) -> None:
        self.sampler = sampler
        self._expect = expect
        self._ahead = ahead
        # With a generator of its own the DataLoader draws nothing from the global one, so training does not depend on
        # how often a loader was started.
        self._loader = DataLoader(
            WindowDataset(maker),
            sampler=sampler,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=_as_is,
            generator=torch.Generator(),
        )

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[TrainBatch]:
        windows = iter(self._loader)  # forks its workers, which is better done before others start threads
        if self._expect is not None:
            self._expect(self.sampler.documents())
        batches = (_map_arrays(batch) for window in windows for batch in window)
        for batch in batches if self._ahead is None else self._ahead(batches):
            self.sampler.advance()
            yield batch
            del batch  # it may be large, and should not be here while the next one is made

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.sampler.epoch, "yielded": self.sampler.yielded, "plan": self._plan()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            ValueError: the position lies inside an epoch of other data or settings, where it means nothing.
        """
        other = state["plan"] != self._plan()
        if state["yielded"] and other:
            raise _inside(state["epoch"], f"micro-batch {state['yielded']}")
        self.sampler.go_to(state["epoch"], state["yielded"], of_another_plan=other)

    def _plan(self) -> str:
        sampler = self.sampler
        return f"{sampler.planner.digest()}/{sampler.world}/{sampler.accumulate}"


def _inside(epoch: int, place: str) -> SettingError:
    """A checkpoint of another plan was written inside an epoch."""
    return SettingError(
        "data",
        f"the checkpoint was written after {place} of epoch {epoch}, but data, packing, accumulation or number of "
        "processes have changed since, so nobody knows what is left of that epoch",
        do="Restore them, resume from a checkpoint of an epoch's end, or start anew with --fresh",
    )


def _as_is(value: Any) -> Any:
    return value


def _map_arrays(batch: TrainBatch) -> TrainBatch:
    return _map_leaves(batch, np.ndarray, torch.from_numpy)


def map_tensors(batch: TrainBatch, function: Callable[[Tensor], Any]) -> TrainBatch:
    """The batch with ``function`` of every tensor in it, whatever its shape."""
    return _map_leaves(batch, Tensor, function)


def _map_leaves(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """A copy of a nest of dataclasses and dicts with ``function`` applied to every leaf of type ``kind``."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {key: _map_leaves(item, kind, function) for key, item in value.items()}
    if not is_dataclass(value):
        return value
    result = copy.copy(value)
    for entry in fields(value):
        setattr(result, entry.name, _map_leaves(getattr(value, entry.name), kind, function))
    return result
