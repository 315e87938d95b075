"""Contract of the block axis: where blocks start, what their slots hold, what is labelled."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Bool, Int
from torch import Tensor

from dflash_lightning.component import Component
from dflash_lightning.types import Alignment, BlockLayout, Document, LabelLayout, SlotInputs


class BlockConstructor(Component, ABC, axis=True):
    """Cuts training blocks out of one document at a time.

    Called in collate, on the CPU, in workers. The result depends on the document's ids and mask and on
    (``seed``, ``epoch``, ``document.sample_id``) only: not on features, batch, rank, worker or resume, so that the same
    document gets the same blocks wherever it lands. ``merge_layouts`` joins documents into rows and batches.

    ``inputs`` says what a drafter trained with these blocks must be fed in decoding: the anchor's token and masks, or
    every token drafted so far.
    """

    block_size: int
    label_layout: LabelLayout
    mask_token_id: int | None
    num_anchors: int | None = None  # most blocks of a document; null sets no bound
    inputs: SlotInputs = "masks"

    @abstractmethod
    def eligible_anchors(self, loss_mask: Bool[Tensor, " S"]) -> Int[Tensor, " n"]:
        """Sorted positions at which a block may start."""

    def num_blocks(self, loss_mask: Bool[Tensor, " S"]) -> int:
        """How many blocks a document of this mask gives, without laying them out: packs are planned with it."""
        count = len(self.eligible_anchors(loss_mask))
        return count if self.num_anchors is None else min(count, self.num_anchors)

    def num_predicting(self, alignment: Alignment) -> int:
        """The most slots of a block that predict something; losses weigh slots by their order among these."""
        return alignment.num_drafts

    @property
    def largest_size(self) -> int:
        """Slots of a block that has grown as far as it may; most blocks never grow."""
        return self.block_size

    def next_size(self) -> int:
        """Slots of a block after it has grown once more."""
        return self.block_size

    def resize(self, block_size: int) -> bool:
        """Make blocks of ``block_size`` slots from now on; false where that cannot be, which is the rule."""
        return False

    @abstractmethod
    def blocks(
        self,
        document: Document,
        alignment: Alignment,
        *,
        seed: int,
        epoch: int,
        vocabulary: Bool[Tensor, " V"] | None = None,
    ) -> BlockLayout:
        """Blocks of ``document`` alone (B = 1, no padding blocks); row indices are positions of the document.

        ``vocabulary`` marks the ids that a reduced draft vocabulary can express; ``None`` means all.
        """
