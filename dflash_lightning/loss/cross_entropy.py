"""Cross-entropy with the data's own tokens, weighted by how early in the block a slot stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dflash_lightning.loss.base import LossTerm
from dflash_lightning.ops.lm_head import LabelLogProb, View
from dflash_lightning.schedule import decay_weights
from dflash_lightning.types import BlockLayout, SlotTotals, StepContext, TargetFeatures


class CrossEntropy(LossTerm):
    """``sum(w_j * -log q(label)) / sum(w_j)`` over valid slots (DFlash, arXiv 2602.06036 sec. 4.2).

    ``w_j = exp(-j / decay)`` where ``j`` counts the *predicting* slots of a block from 0, valid or not: the first draft
    weighs 1 in both label layouts. A mistake there loses the whole block, one in the last slot a single token.
    ``decay`` null weighs all alike; the paper uses 7, 5 and 4 for blocks of 16, 10 and 8.
    """

    name: ClassVar[str] = "cross_entropy"

    def __init__(
        self,
        *,
        decay: float | int | None = None,  # slots over which the weight falls to 1/e; null weighs all alike
        coefficient: float | int = 1.0,  # weight of the term in the sum
        view: str = "main",  # which of the head's distributions is scored
    ) -> None:
        if decay is not None and not decay > 0:
            raise ValueError(
                f"loss.decay: {decay} does not decay. It is the number of slots over which the weight falls to 1/e: "
                "use a positive number (DFlash: 7 for block size 16, 5 for 10, 4 for 8), or null for equal weights."
            )
        self.decay = None if decay is None else float(decay)
        self.coefficient = float(coefficient)
        self.view = view

    def numerator(
        self, views: Mapping[str, View], layout: BlockLayout, features: TargetFeatures, ctx: StepContext
    ) -> Float[Tensor, ""]:
        if self.view not in views:
            raise ValueError(
                f"loss.view: the head offers no view {self.view!r}. Use one of {sorted(views)}, or a head that has it."
            )
        (log_prob,) = views[self.view].scalars(LabelLogProb(layout.labels))
        weights = slot_weights(layout.predicts, self.decay)
        # where, not a product: an invalid slot may hold NaN, and 0 * NaN is NaN.
        return torch.where(layout.valid, -weights * log_prob, 0.0).sum()

    def denominator(self, totals: SlotTotals, layout_shift: int) -> Float[Tensor, ""]:
        counts = totals.valid[1 - layout_shift :]
        return (counts * decay_weights(len(counts), self.decay, device=counts.device)).sum()


def slot_weights(predicts: Bool[Tensor, "B N K"], decay: float | None) -> Float[Tensor, "B N K"]:
    """``exp(-j / decay)`` at the ``j``-th predicting slot of every block; what stands at other slots means nothing."""
    order = (predicts.cumsum(-1) - 1).clamp(min=0)
    return decay_weights(predicts.shape[-1], decay, device=predicts.device)[order]
