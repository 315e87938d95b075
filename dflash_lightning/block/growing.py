"""Blocks that become longer while a drafter trains, when it fills them too often (DBloom, arXiv 2608.30427)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from jaxtyping import Bool
from torch import Tensor

from dflash_lightning.block.anchored import Anchored
from dflash_lightning.errors import SettingError
from dflash_lightning.types import Alignment, BlockLayout, Document, LabelLayout


class Growing(Anchored):
    """The blocks of ``Anchored``, of ``block_size`` slots at first and of ``largest`` in the end.

    Each time it grows by ``step`` slots. When, is decided outside: by ``callbacks.BlockGrowth``, from what decoding
    finds. ``block_size`` is always the size of now, which the drafter's configuration states too: what is saved and
    decoded with is what was trained. The drafter must not have weights that belong to a slot.
    """

    name: ClassVar[str] = "growing"

    def __init__(
        self,
        *,
        block_size: int = 16,  # slots of a block at the start, the anchor's included
        largest: int = 24,  # slots of a block that has grown as far as it may
        step: int = 8,  # slots that a block grows by
        num_anchors: int = 512,  # blocks drawn per document and epoch
        mask_token_id: int | None = None,  # embedding row fed to slots to be drafted; null chooses an unused one
        label_layout: LabelLayout = "same_position",  # whether slot i predicts its own position or the next one
    ) -> None:
        super().__init__(
            block_size=block_size, num_anchors=num_anchors, mask_token_id=mask_token_id, label_layout=label_layout
        )
        if step < 1:
            raise SettingError("block.step", f"{step} is no growth", "Use 1 or more (8)")
        if largest < block_size:
            raise SettingError(
                "block.largest", f"{largest}, but blocks have {block_size} slots at the start", "Use that or more"
            )
        self.smallest = block_size
        self.largest = largest
        self.step = step

    @property
    def largest_size(self) -> int:
        return self.largest

    def next_size(self) -> int:
        """Slots of a block after one more growth; those of now where it may not grow."""
        return min(self.block_size + self.step, self.largest)

    def resize(self, block_size: int) -> bool:
        if not self.smallest <= block_size <= self.largest:
            return False
        self.block_size = block_size
        return True

    def blocks(
        self,
        document: Document,
        alignment: Alignment,
        *,
        seed: int,
        epoch: int,
        vocabulary: Bool[Tensor, " V"] | None = None,
    ) -> BlockLayout:
        now = replace(alignment, block_size=self.block_size)
        return super().blocks(document, now, seed=seed, epoch=epoch, vocabulary=vocabulary)
