"""A head's confidence in its drafts, taught by how often the target would accept them."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_lightning.loss.base import Labels, check_temperature, taught
from dflash_lightning.loss.slotwise import SlotwiseLoss
from dflash_lightning.ops.lm_head import HeadOutput, Overlap, Teacher
from dflash_lightning.types import BlockLayout, FeatureSpec

_LEAST = 1e-6  # of a probability: the logarithm of less is no number to learn from in fp32


class ConfidenceLoss(SlotwiseLoss):
    """Binary cross-entropy of a head's confidence with the chance of acceptance (DSpark, arXiv 2607.05147 sec. 3).

    The chance that rejection accepts a draft of the slot is the overlap ``sum_v min(p(v), q(v))`` of the target's law
    and the draft's, both at ``temperature``. It is the label, without gradient, so the term trains the signal and what
    the head lets its gradient through to. Least where both are equal; it is then the entropy of that chance, not 0.
    """

    name: ClassVar[str] = "confidence"
    labels: Labels = "target"

    def __init__(
        self,
        *,
        signal: str = "confidence",  # which of the head's signals is trained: probabilities per slot
        temperature: float | int = 1.0,  # divides the logits of both laws: the temperature that decoding will use
        decay: float | int | None = None,  # slots over which the weight falls to 1/e; null weighs all alike
        prefix: bool = False,  # count only the unbroken run of valid slots at the start of a block
        coefficient: float | int = 1.0,  # weight of the term in the sum
        view: str = "main",  # the distribution whose acceptance is meant
    ) -> None:
        super().__init__(decay=decay, coefficient=coefficient, view=view, prefix=prefix)
        self.signal = signal
        self.temperature = check_temperature(temperature)
        self.reads = (signal,)

    def required(self) -> FeatureSpec:
        return FeatureSpec(last_hidden=True)

    def per_slot(self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None) -> Float[Tensor, "B N K"]:
        (overlap,) = self.view_of(out).ask(Overlap(taught(teacher), temperature=self.temperature))
        # A slot that is not counted may hold anything: it gets a harmless pair, so that no NaN enters a gradient.
        signal = torch.where(layout.valid, out.signals[self.signal].float(), 0.5).clamp(_LEAST, 1.0 - _LEAST)
        chance = torch.where(layout.valid, overlap.detach().float(), 0.5).clamp(0.0, 1.0)
        return -(chance * signal.log() + (1.0 - chance) * (-signal).log1p())  # torch's own is not for autocast
