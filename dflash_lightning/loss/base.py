"""Contract of the loss axis: sums over slots, divided only after every rank has been counted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from dflash_lightning.component import Component
from dflash_lightning.ops.lm_head import View
from dflash_lightning.types import BlockLayout, FeatureSpec, SlotTotals, StepContext, TargetFeatures


class LossTerm(Component, ABC, axis=True):
    """One term of the training loss: ``coefficient(ctx) * numerator / denominator``.

    ``numerator`` is called once per micro-batch with gradients enabled, in or out of autocast. It returns a sum, never
    a mean, and ignores every slot that is not ``layout.valid``, whatever the view returns there. ``denominator`` is
    computed from counts over all ranks and the whole accumulation window, so the gradient does not depend on how a
    batch is split.

    ``needs_samples`` says that the term estimates an expectation over what the target *draws*. Greedy responses would
    bias it without a sign, so they are refused.
    """

    needs_samples: ClassVar[bool] = False
    coefficient: float
    view: str

    def coef(self, ctx: StepContext) -> float:
        """Weight of the term at this step; a term that weighs 0 is still evaluated (DDP wants every parameter)."""
        return self.coefficient

    def required(self) -> FeatureSpec:
        """Target features the term reads."""
        return FeatureSpec()

    @abstractmethod
    def numerator(
        self, views: Mapping[str, View], layout: BlockLayout, features: TargetFeatures, ctx: StepContext
    ) -> Float[Tensor, ""]:
        """The term's sum over the valid slots of this micro-batch."""

    @abstractmethod
    def denominator(self, totals: SlotTotals, layout_shift: int) -> Float[Tensor, ""]:
        """What the sum is divided by; ``layout_shift`` is ``Alignment.shift`` (slot 0 predicts iff it is 1)."""
