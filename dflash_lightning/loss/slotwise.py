"""Losses that are a weighted mean of one number per slot, weighted by how early in the block a slot stands."""

from __future__ import annotations

from abc import abstractmethod

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dflash_lightning.errors import SettingError
from dflash_lightning.loss.base import LossTerm
from dflash_lightning.ops.lm_head import HeadOutput, Teacher
from dflash_lightning.schedule import decay_weights
from dflash_lightning.types import BlockLayout, SlotTotals, StepContext


class SlotwiseLoss(LossTerm):
    """``sum(w_j * loss of the slot) / sum(w_j)`` over valid slots.

    ``w_j = exp(-j / decay)`` where ``j`` counts the *predicting* slots of a block from 0, valid or not: the first draft
    weighs 1 in both label layouts. A mistake there loses the whole block, one in the last slot a single token.
    ``decay`` null weighs all alike; DFlash (arXiv 2602.06036 sec. 4.2) uses 7, 5 and 4 for blocks of 16, 10 and 8.
    ``prefix`` counts only the unbroken run of valid slots at the start of a block (DSpark, arXiv 2607.05147): what
    stands behind an unlabelled slot is a continuation that no draft is judged on.
    """

    def __init__(self, *, decay: float | int | None, coefficient: float | int, view: str, prefix: bool = False) -> None:
        if decay is not None and not decay > 0:
            raise SettingError(
                "loss.decay",
                f"{decay} does not decay",
                "It is the number of slots over which the weight falls to 1/e: use a positive number (DFlash: 7 "
                "for block size 16, 5 for 10, 4 for 8), or null for equal weights",
            )
        self.decay = None if decay is None else float(decay)
        self.coefficient = float(coefficient)
        self.view = view
        self.prefix = prefix

    @abstractmethod
    def per_slot(self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None) -> Float[Tensor, "B N K"]:
        """The loss of each slot, in nats or as a probability; anything where the slot is not valid."""

    def numerator(
        self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None, ctx: StepContext
    ) -> Float[Tensor, ""]:
        losses = self.per_slot(out, layout, teacher)
        weights = slot_weights(layout.predicts, self.decay)
        # where, not a product: an invalid slot may hold NaN, and 0 * NaN is NaN.
        return torch.where(unbroken(layout) if self.prefix else layout.valid, weights * losses, 0.0).sum()

    def denominator(self, totals: SlotTotals) -> Float[Tensor, ""]:
        counts = totals.prefix_valid if self.prefix else totals.valid
        return (counts * decay_weights(len(counts), self.decay, device=counts.device)).sum()


def slot_weights(predicts: Bool[Tensor, "B N K"], decay: float | None) -> Float[Tensor, "B N K"]:
    """``exp(-j / decay)`` at the ``j``-th predicting slot of every block; what stands at other slots means nothing."""
    order = (predicts.cumsum(-1) - 1).clamp(min=0)
    return decay_weights(predicts.shape[-1], decay, device=predicts.device)[order]


def unbroken(layout: BlockLayout) -> Bool[Tensor, "B N K"]:
    """Valid slots before which every predicting slot of the block is valid too."""
    return (layout.valid | ~layout.predicts).cumprod(-1).bool() & layout.valid
