"""Block axis: where training blocks start, what their slots hold, what is labelled."""

from dflash_lightning.block.anchored import Anchored
from dflash_lightning.block.base import BlockConstructor
from dflash_lightning.block.check import check_layout
from dflash_lightning.block.merge import count_slots, merge_layouts

__all__ = ["Anchored", "BlockConstructor", "check_layout", "count_slots", "merge_layouts"]
