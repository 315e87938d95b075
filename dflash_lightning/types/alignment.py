"""How slots, positions and labels of a block line up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dflash_lightning.errors import SettingError

LabelLayout = Literal["same_position", "anchor_first"]
# What slots behind the anchor's hold in training: mask tokens to be replaced, or the true tokens of their places.
SlotInputs = Literal["masks", "tokens"]
LABEL_LAYOUTS: tuple[LabelLayout, ...] = ("same_position", "anchor_first")


@dataclass(frozen=True)
class Alignment:
    """How slots, positions and labels of a block line up; made from ``DraftConfig``, read by training and decoding.

    A block starts at an *anchor*: the last token known as a token whose target features do not exist yet. Slot ``i``
    stands at position ``anchor + i`` and is fed the anchor token (slot 0) or the mask token. Slot ``i`` predicts the
    token at ``anchor + i`` (``same_position``, DFlash; slot 0 predicts nothing) or at ``anchor + i + 1``
    (``anchor_first``, DSpark sec. 3.1).
    """

    block_size: int
    mask_token_id: int
    label_layout: LabelLayout = "same_position"

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise SettingError(
                "block.block_size",
                f"{self.block_size} leaves no slot to draft",
                "It counts the anchor slot, so use 2 or more (DFlash uses 16)",
            )
        if self.label_layout not in LABEL_LAYOUTS:
            raise SettingError(
                "block.label_layout", f"{self.label_layout!r} is unknown", f"Use one of {list(LABEL_LAYOUTS)}"
            )

    @property
    def shift(self) -> int:
        """Offset from a slot's own position to the position it predicts."""
        return 0 if self.label_layout == "same_position" else 1

    @property
    def first_slot(self) -> int:
        """First slot that predicts something."""
        return 1 - self.shift

    @property
    def num_drafts(self) -> int:
        """Tokens proposed per round."""
        return self.block_size - self.first_slot
