"""The family of losses that combine a loss of each slot with a weight of each slot, both chosen by name."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_lightning.errors import SettingError
from dflash_lightning.loss.base import Normalize, SlotwiseLoss, check_normalize, check_temperature
from dflash_lightning.loss.slot_losses import SLOT_LOSSES, Loss
from dflash_lightning.loss.weights import WEIGHTS, Block, WeightKind
from dflash_lightning.ops.lm_head import HeadOutput, Teacher
from dflash_lightning.types import BlockLayout, FeatureSpec


class WeightedLoss(SlotwiseLoss):
    """``sum(weight_k * loss_k) / divisor`` over the valid slots ``k`` of all blocks; weights carry no gradient.

    ``loss`` names a formula in ``loss/slot_losses.py``, ``weight`` one in ``loss/weights.py``. With ``ce`` and
    ``decay`` it is ``CrossEntropy`` (DFlash). The usual other choices are options of recipes: ``d_pace``, ``eal``,
    ``auf``, ``vat``, ``d_pard``, ``dpala``, ``wtv``, ``pard2``, ``lk_alpha``, ``lk_hybrid``.

    Weights that follow the drafter are no divisor, because divisors are counted before the forward pass; published code
    of PARD-2, and of D-PACE in AngelSpec, has them as one. Spec-AUF and VAT do not state theirs (``slots`` is ours).
    """

    name: ClassVar[str] = "weighted"

    def __init__(
        self,
        *,
        loss: Loss = "ce",  # what a slot loses
        weight: WeightKind = "decay",  # what it weighs
        alpha: float | int | None = None,  # smooths the chances of weights label and overlap: 0 not, 1 wholly
        decay: float | int | None = None,  # slots over which weights decay, auf and vat fall to 1/e; null: they do not
        labels: Literal["data", "target"] = "data",  # y: the row's own token, or the target's likeliest
        temperature: float | int = 1.0,  # divides the logits of both laws
        eta: float | int = 3.0,  # how fast lk_hybrid goes from KL to total variation as the overlap grows
        normalize: Normalize = "slots",  # divisor: slots, blocks, documents, document_mean; weights with decay only
        prefix: bool = False,  # count only the unbroken run of valid slots at the start of a block
        coefficient: float | int = 1.0,  # weight of the term in the sum
        view: str = "main",  # which of the head's distributions is scored
    ) -> None:
        super().__init__(decay=decay, coefficient=coefficient, view=view, prefix=prefix)
        for setting, given, known in (("loss", loss, Loss), ("weight", weight, WeightKind)):
            if given not in get_args(known):
                raise SettingError(f"loss.{setting}", f"{given!r} is unknown", f"Use one of {list(get_args(known))}")
        if labels not in ("data", "target"):
            raise SettingError("loss.labels", f"{labels!r} is unknown", "Use 'data' or 'target'")
        if eta < 0:
            raise SettingError("loss.eta", f"{eta} would favour KL where drafts are accepted", "Use 0 or more (3)")
        check_normalize(normalize)
        self.loss: Loss = loss
        self.weight: WeightKind = weight
        self.labels = labels
        self.temperature = check_temperature(temperature)
        self.eta = float(eta)
        self.normalize = normalize
        self.alpha = self._checked_alpha(alpha)

    def per_slot(self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None) -> Float[Tensor, "B N K"]:
        block, slot_loss = self._block(layout, teacher), SLOT_LOSSES[self.loss]
        asked = slot_loss.ask(block)
        # The weight's questions go along, so that one pass over the logits answers all.
        answers = self.view_of(out).ask(*asked, *WEIGHTS[self.weight].ask(block))
        return slot_loss.make(answers[: len(asked)], self.temperature, self.eta)

    def weights(self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None) -> Float[Tensor, "B N K"]:
        block, weight = self._block(layout, teacher), WEIGHTS[self.weight]
        answers = self.view_of(out).ask(*weight.ask(block))
        return weight.weigh(answers, block, self.counted(layout), self.alpha, self.decay)

    def figures(self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None) -> dict[str, Float[Tensor, ""]]:
        """The sum of the weights where they follow the drafter: how much is trained (of ``auf``: how many slots)."""
        if self.weight == "decay":
            return {}
        return {"weight": torch.where(self.counted(layout), self.weights(out, layout, teacher), 0.0).sum()}

    def required(self) -> FeatureSpec:
        reads = SLOT_LOSSES[self.loss].reads_law or WEIGHTS[self.weight].reads != "nothing"
        return FeatureSpec(last_hidden=reads or self.labels == "target")

    def laws(self) -> tuple[float, ...]:
        reads = SLOT_LOSSES[self.loss].reads_law or WEIGHTS[self.weight].reads == "law"
        return (self.temperature,) if reads else ()

    def _block(self, layout: BlockLayout, teacher: Teacher | None) -> Block:
        return Block(layout, teacher, self.labels == "target", self.temperature)

    def _checked_alpha(self, alpha: float | int | None) -> float | None:
        """The smoothing, after a look at what goes with the weight.

        Raises:
            ValueError: a setting that the weight has no use for, none where it needs one, or one out of its range.
        """
        weight, name = WEIGHTS[self.weight], self.weight
        if self.decay is not None and not weight.decays:
            raise SettingError(
                "loss.decay", f"weight {name!r} says itself what a place is worth", "Use null, or weight=decay"
            )
        if self.normalize == "weights" and name != "decay":
            raise SettingError(
                "loss.normalize", f"the sum of weight {name!r} is not known before the forward pass", "Use slots"
            )
        if weight.smoothed and (alpha is None or not 0 <= alpha <= 1):
            raise SettingError("loss.alpha", f"{alpha} is not a share", "Use 0..1 (D-PACE: 0.5)")
        if alpha is not None and not weight.smoothed:
            raise SettingError("loss.alpha", f"weight {name!r} smooths nothing", "Use null, or weight=label or overlap")
        return None if alpha is None else float(alpha)
