"""Contract of the loss axis: sums over slots, divided only after every rank has been counted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from dflash_lightning.component import Component
from dflash_lightning.errors import SettingError
from dflash_lightning.ops.lm_head import HeadOutput, Teacher, View
from dflash_lightning.types import BlockLayout, FeatureSpec, SlotTotals, StepContext

Labels = Literal["data", "target", "samples"]


class LossTerm(Component, ABC, axis=True):
    """One term of the training loss: ``coefficient(ctx) * numerator / denominator``.

    ``numerator`` is called once per micro-batch with gradients enabled, in or out of autocast. It returns a sum, never
    a mean, and ignores every slot that is not ``layout.valid``, whatever the view returns there. ``denominator`` is
    computed from counts over all ranks and the whole accumulation window, so the gradient does not depend on how a
    batch is split. A denominator that depends on the forward pass is not possible.

    ``labels`` says what a slot is taught: ``"data"`` the token of the training row, ``"target"`` what the target says
    of it, whatever the row holds, ``"samples"`` the token of the row as a *draw* from the target's law at
    ``temperature``. The last estimates an expectation, which other tokens (greedy ones, draws at another temperature or
    cut by top-k or top-p) would bias without a sign, so data that is known to hold such tokens is refused.
    """

    labels: Labels = "data"
    temperature: float = 1.0
    coefficient: float
    view: str
    reads: tuple[str, ...] = ()  # the signals of the head that the term trains
    former: ClassVar[Mapping[str, str]] = {
        "needs_samples": 'write labels = "samples", and temperature if it is not 1',
        "numerator.views": "out.views holds them",
        "denominator.layout_shift": "totals count the slots that predict, so there is nothing to shift",
    }

    def coef(self, ctx: StepContext) -> float:
        """Weight of the term at this step; a term that weighs 0 is still evaluated (DDP wants every parameter)."""
        return self.coefficient

    def required(self) -> FeatureSpec:
        """Target features the term reads; ``last_hidden`` gives it a teacher."""
        return FeatureSpec()

    def laws(self) -> tuple[float, ...]:
        """Temperatures at which the term reads probabilities of the target's law, not its likeliest token alone."""
        return (self.temperature,) if self.required().last_hidden else ()

    @abstractmethod
    def numerator(
        self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None, ctx: StepContext
    ) -> Float[Tensor, ""]:
        """The term's sum over the valid slots of this micro-batch; ``teacher`` is null unless ``required`` asks."""

    @abstractmethod
    def denominator(self, totals: SlotTotals) -> Float[Tensor, ""]:
        """What the sum is divided by."""

    def view_of(self, out: HeadOutput) -> View:
        """The view that the term scores.

        Raises:
            ValueError: the head has no view of that name.
        """
        if self.view not in out.views:
            known = sorted(out.views)
            raise SettingError(
                "loss.view", f"the head offers no view {self.view!r}", f"Use one of {known}, or a head that has it"
            )
        return out.views[self.view]


def taught(teacher: Teacher | None) -> Teacher:
    """The teacher of a term that asked for one."""
    assert teacher is not None, "the term reads a teacher, so its required() must ask for last_hidden"
    return teacher


def check_temperature(temperature: float | int) -> float:
    """Refuse a temperature at which a law has no gradient.

    Raises:
        ValueError: it is not positive and finite.
    """
    if not 0 < temperature < float("inf"):
        raise SettingError(
            "loss.temperature", f"{temperature} gives no law to compare", "Use a positive number, e.g. 1"
        )
    return float(temperature)
