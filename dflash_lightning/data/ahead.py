"""Batches that are ready before they are asked for: moved to the device, with features, in a queue beside the steps.

    main   step 1         | step 2         | step 3
    side   batch 2        | batch 3        | batch 4

Step 2 waits for batch 2 in the device's queue, and the program waits for neither. Batch 3 begins when step 1 is done.
So there are never more than two batches, whatever takes longer. They may take the memory of three: what batch 1 had is
given away again once the allocator sees that step 1 is done, and the program is ahead of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer
from torch import Tensor

from dflash_lightning.data.batch.loader import PlanSampler, map_tensors
from dflash_lightning.data.batch.of_trainer import follows
from dflash_lightning.data.settings import Prefetch
from dflash_lightning.device import SideQueue, abilities
from dflash_lightning.errors import SettingError
from dflash_lightning.types import TrainBatch


@dataclass
class _Begun:
    """A batch whose work is in the side queue, up to ``mark``; or what went wrong with it."""

    batch: TrainBatch | None = None
    mark: Any = None
    error: Exception | None = None


class LookAhead:
    """Hands out batches made ready, each with the next one begun. ``setting`` is ``data.prefetch_features``.

    There is one side queue for a whole run, because memory that a queue has used is kept for that queue.
    """

    def __init__(self, setting: Prefetch) -> None:
        self.setting = setting
        self._queue: SideQueue | None = None

    def pays(self, device: torch.device, *, cut: bool, made_here: bool) -> bool:
        """Whether it looks ahead on ``device``.

        ``cut`` says that all ranks compute the target's pass together, ``made_here`` that the data makes the features.

        Raises:
            SettingError: the setting is true, and something speaks against it.
        """
        why_not = None
        if not abilities(device).streams:
            why_not = f"a device of type {device.type!r} has no second queue in which they could be computed"
        elif cut:
            why_not = "the target is cut over ranks (target.tensor_parallel), which would wait for one another in steps"
        elif not made_here:
            why_not = "the module reads the texts itself, because it plays a round before each step"
        if self.setting is True and why_not is not None:
            raise SettingError("data.prefetch_features", f"true, but {why_not}", do="Set it to auto or false")
        return self.setting is not False and why_not is None

    def hand_out(
        self,
        batches: Iterator[TrainBatch],
        sampler: PlanSampler,
        trainer: Trainer,
        before: Callable[[TrainBatch], TrainBatch],
        after: Callable[[TrainBatch], TrainBatch],
    ) -> Iterator[TrainBatch]:
        """``batches`` in their order, ready on the trainer's device; none is begun that Lightning will not ask for.

        ``before`` and ``after`` say what is done with a batch before it is moved and there. Lightning's own hooks then
        find nothing left to do. An error is raised where the batch that it belongs to is asked for.
        """
        device = trainer.strategy.root_device
        queue = self._queue = self._queue or SideQueue(device)

        def begin() -> _Begun | None:
            try:
                if (batch := next(batches, None)) is None:
                    return None
                with queue.behind_main():
                    return _Begun(after(move_data_to_device(before(batch), device)), queue.mark())
            except (
                Exception
            ) as error:  # whatever it is: it belongs to this batch, and the one before is trained on first
                return _Begun(error=error)

        begun = begin()
        while begun is not None:
            batch, ahead = _taken(begun, queue), follows(sampler, trainer)
            begun = begin() if ahead else None
            yield batch
            del batch  # before the next one is begun: a third batch has no room
            begun = begun if ahead else begin()


def _taken(begun: _Begun, queue: SideQueue) -> TrainBatch:
    """The batch, for the main queue to use from here on."""
    if begun.error is not None:
        raise begun.error
    assert begun.batch is not None
    batch, begun.batch = begun.batch, None
    tensors: list[Tensor] = []
    map_tensors(batch, lambda tensor: tensors.append(tensor))
    queue.hand_over(begun.mark, tensors)
    return batch
