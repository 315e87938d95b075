"""Cross entropy that weighs the slots of a block that has grown more than those that were there (DBloom)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_lightning.errors import SettingError
from dflash_lightning.loss.base import Teacher
from dflash_lightning.loss.weighted import WeightedLoss
from dflash_lightning.ops.lm_head import HeadOutput
from dflash_lightning.types import BlockLayout, SlotTotals


class SteppedCrossEntropy(WeightedLoss):
    """``sum(w_j * -log q(label)) / sum(w_j)`` with ``w_j = 1`` for the first ``trained`` drafts and ``factor`` behind.

    DBloom (arXiv 2608.30427) extends blocks of 16 slots to 24 with weight 1 for drafts 1 to 15 and 3 for the new ones,
    without any decay, on the token that the target finds likeliest. (Its notes say that the weights were of no
    significance.)
    """

    name: ClassVar[str] = "stepped_cross_entropy"

    def __init__(
        self,
        *,
        trained: int = 15,  # drafts that the block had before it grew; they weigh 1
        factor: float | int = 3.0,  # what a further draft weighs
        labels: Literal["data", "target"] = "target",  # the row's own token, or the one that the target finds likeliest
        coefficient: float | int = 1.0,  # weight of the term in the sum
        view: str = "main",  # which of the head's distributions is scored
    ) -> None:
        if trained < 0:
            raise SettingError("loss.trained", f"{trained} is no number of drafts", "Use 0 or more (15)")
        if not factor > 0:
            raise SettingError("loss.factor", f"{factor} teaches nothing", "Use a positive number (3)")
        super().__init__(labels=labels, coefficient=coefficient, view=view)
        self.normalize = "weights"
        self.trained = trained
        self.factor = float(factor)

    def check_drafts(self, num_drafts: int) -> None:
        if self.trained > num_drafts:
            raise SettingError(
                "loss.trained",
                f"{self.trained}, but a block never has more than {num_drafts} drafts: factor would be ignored",
                f"Use a number from 0 to {num_drafts}: the drafts that a block had before it grew",
            )

    def by_order(self, count: int, device: torch.device | None = None) -> Float[Tensor, " Kp"]:
        """What the first ``count`` drafts weigh."""
        return torch.where(torch.arange(count, device=device) < self.trained, 1.0, self.factor)

    def weights(self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None) -> Float[Tensor, "B N K"]:
        order = (layout.predicts.cumsum(-1) - 1).clamp(min=0)
        return self.by_order(order.shape[-1], order.device)[order]

    def denominator(self, totals: SlotTotals) -> Float[Tensor, ""]:
        return (totals.valid * self.by_order(len(totals.valid), totals.valid.device)).sum()
