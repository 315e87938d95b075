"""Block axis: where training blocks start, what their slots hold, what is labelled."""

from dflash_lightning.block.anchored import Anchored, lay_out
from dflash_lightning.block.at_rows import count_batch, lay_out_at
from dflash_lightning.block.base import BlockConstructor
from dflash_lightning.block.check import check_anchored, check_layout
from dflash_lightning.block.growing import Growing
from dflash_lightning.block.masked import Masked
from dflash_lightning.block.merge import count_slots, merge_layouts
from dflash_lightning.block.recorded import Recorded
from dflash_lightning.block.variable_prefix import VariablePrefix

__all__ = [
    "Anchored",
    "BlockConstructor",
    "Growing",
    "Masked",
    "Recorded",
    "VariablePrefix",
    "check_anchored",
    "check_layout",
    "count_batch",
    "count_slots",
    "lay_out",
    "lay_out_at",
    "merge_layouts",
]
