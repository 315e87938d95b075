"""The expected number of drafts that stand, as a product of chances of acceptance."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_lightning.errors import SettingError
from dflash_lightning.loss.base import Labels, LossTerm, check_temperature, taught, unbroken
from dflash_lightning.ops.lm_head import HeadOutput, Overlap, Teacher
from dflash_lightning.types import BlockLayout, FeatureSpec, SlotTotals, StepContext


class ProductLoss(LossTerm):
    """``sum_j (1 - r_j)`` over the valid slots of a block, with ``r_j = a_1 .. a_j``; blocks are averaged.

    ``a_k = sum_v min(p(v), q(v))`` is the chance that draft ``k`` is accepted if those before it are, at
    ``temperature``. Other than in ``WeightedLoss`` the gradient goes through the whole product. ``average`` takes the
    mean over a block's valid slots in place of the sum. With it this is AngelSpec's end-to-end total variation (MT
    6.6), the second stage of DFly (arXiv 2607.25852). A slot that is not valid stops no product and is not counted;
    ``prefix`` leaves out what is behind one.

    ``floor`` keeps the product from vanishing: ``r_j = max(a_1 .. a_{j-1}, floor) a_j``, so that a late slot learns
    something as long as early ones fail. With it and the sum this is the objective of DBLast (arXiv 2608.05448),
    RECONSTRUCTED: its abstract says "truncated" and no formula. A new drafter learns little from products of small
    numbers, with 0 next to nothing: begin with a trained one, or beside another loss.

    The overlaps are those along the row's own tokens. Averaged over rows that the target drew, ``sum r_j`` is near the
    number of drafts that rejection accepts, and not equal to it (1.995 and 2.007 in the tests' example).
    """

    name: ClassVar[str] = "product"
    labels: Labels = "target"

    def __init__(
        self,
        *,
        average: bool = True,  # over a block's valid slots, in place of their sum
        floor: float | int = 0.0,  # least product that a slot is multiplied with; 0: the product itself
        temperature: float | int = 1.0,  # divides the logits of both laws: the temperature that decoding will use
        prefix: bool = False,  # count only the unbroken run of valid slots at the start of a block
        coefficient: float | int = 1.0,  # weight of the term in the sum
        view: str = "main",  # which of the head's distributions is scored
    ) -> None:
        if not 0 <= floor < 1:
            raise SettingError(
                "loss.floor", f"{floor} is no chance that is to be reached", "Use 0 or more, below 1; 0 for none"
            )
        self.average = average
        self.floor = float(floor)
        self.temperature = check_temperature(temperature)
        self.prefix = prefix
        self.coefficient = float(coefficient)
        self.view = view

    def required(self) -> FeatureSpec:
        return FeatureSpec(last_hidden=True)

    def numerator(
        self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None, ctx: StepContext
    ) -> Float[Tensor, ""]:
        (overlap,) = self.view_of(out).ask(Overlap(taught(teacher), temperature=self.temperature))
        counted = unbroken(layout) if self.prefix else layout.valid
        reached = self._reached(torch.where(counted, overlap, 1.0))  # where: an invalid slot may hold anything
        lost = torch.where(counted, 1.0 - reached, 0.0).sum(-1)
        return (lost / counted.sum(-1).clamp(min=1) if self.average else lost).sum()

    def denominator(self, totals: SlotTotals) -> Float[Tensor, ""]:
        return totals.prefix_valid[0] if self.prefix else totals.blocks

    def _reached(self, chances: Float[Tensor, "B N K"]) -> Float[Tensor, "B N K"]:
        """``r_j``. One product after the other: the gradient of ``cumprod`` would ask the device whether one is 0."""
        found, product = [], torch.ones_like(chances[..., 0])
        for chance in chances.unbind(-1):
            found.append((product.clamp(min=self.floor) if self.floor else product) * chance)
            product = product * chance
        return torch.stack(found, dim=-1)
