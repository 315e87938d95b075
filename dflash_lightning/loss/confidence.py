"""A head's confidence in its drafts, taught by how often the target would accept them."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_lightning.errors import SettingError
from dflash_lightning.loss.base import Labels, Normalize, SlotwiseLoss, check_normalize, check_temperature, taught
from dflash_lightning.loss.weights import first_failure
from dflash_lightning.ops.lm_head import Argmax, Detached, HeadOutput, Overlap, Teacher
from dflash_lightning.types import BlockLayout, FeatureSpec

_LEAST = 1e-6  # of a probability: the logarithm of less is no number to learn from in fp32


class ConfidenceLoss(SlotwiseLoss):
    """Binary cross-entropy of a head's confidence with what becomes of its drafts.

    ``label: overlap`` is the chance that rejection accepts a draft of the slot, ``sum_v min(p(v), q(v))`` of the
    target's law and the draft's, both at ``temperature`` (DSpark, arXiv 2607.05147 sec. 3). ``label: survival`` is 1
    where the likeliest drafts of the slot and of all slots before it are the target's likeliest tokens, else 0 (VAT,
    arXiv 2608.30135): a chance for the whole draft up to there, so a policy must not multiply it up.

    The label carries no gradient: the term trains the signal, and the weights to which the head passes its gradient. It
    is least where signal and label are equal. With the overlap it is then the entropy of that chance, not 0.
    """

    name: ClassVar[str] = "confidence"
    labels: Labels = "target"

    def __init__(
        self,
        *,
        signal: str = "confidence",  # which of the head's signals is trained: probabilities per slot
        label: Literal["overlap", "survival"] = "overlap",  # chance of acceptance, or whether greedy ones stand
        temperature: float | int = 1.0,  # divides the logits of both laws: the temperature that decoding will use
        decay: float | int | None = None,  # slots over which the weight falls to 1/e; null weighs all alike
        prefix: bool = False,  # count only the unbroken run of valid slots at the start of a block
        normalize: Normalize = "weights",  # divisor: weights, slots, blocks, documents or document_mean
        coefficient: float | int = 1.0,  # weight of the term in the sum
        view: str = "main",  # the distribution whose acceptance is meant
    ) -> None:
        super().__init__(decay=decay, coefficient=coefficient, view=view, prefix=prefix)
        if label not in ("overlap", "survival"):
            raise SettingError("loss.label", f"{label!r} is unknown", "Use 'overlap' or 'survival'")
        check_normalize(normalize)
        self.normalize = normalize
        self.signal = signal
        self.label: Literal["overlap", "survival"] = label
        self.temperature = check_temperature(temperature)
        self.reads = (signal,)

    def required(self) -> FeatureSpec:
        return FeatureSpec(last_hidden=True)

    def laws(self) -> tuple[float, ...]:
        return (self.temperature,) if self.label == "overlap" else ()

    def per_slot(self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None) -> Float[Tensor, "B N K"]:
        # A slot that is not counted may hold anything: it gets a harmless pair, so that no NaN enters a gradient.
        signal = torch.where(layout.valid, out.signals[self.signal].float(), 0.5).clamp(_LEAST, 1.0 - _LEAST)
        chance = torch.where(layout.valid, self._chances(out, layout, taught(teacher)), 0.5).clamp(0.0, 1.0)
        return -(chance * signal.log() + (1.0 - chance) * (-signal).log1p())  # torch's own is not for autocast

    def _chances(self, out: HeadOutput, layout: BlockLayout, teacher: Teacher) -> Float[Tensor, "B N K"]:
        if self.label == "overlap":
            (overlap,) = self.view_of(out).ask(Detached(Overlap(teacher, temperature=self.temperature)))
            return overlap.float()
        (drafts,) = self.view_of(out).ask(Argmax())
        slots = torch.arange(drafts.shape[-1], device=drafts.device)
        return (slots < first_failure(drafts == teacher.labels(), self.counted(layout))).float()
