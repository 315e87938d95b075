"""Cross-entropy over the candidates of a slot, for heads that choose among a few tokens."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dflash_lightning.errors import SettingError
from dflash_lightning.loss.base import SlotwiseLoss
from dflash_lightning.loss.lattice import chosen_among
from dflash_lightning.ops.candidates import place_of
from dflash_lightning.ops.lm_head import HeadOutput, Teacher
from dflash_lightning.types import BlockLayout, StepContext

Missing = Literal["drop", "replace_last"]
Divisor = Literal["covered", "all"]


class CandidateCrossEntropy(SlotwiseLoss):
    """``-log q(label)`` among the candidates of a slot, given the true token before it (DFlash 2; MH 2.2).

    ``missing`` says what becomes of a slot whose label is none of its candidates: ``drop`` leaves it out,
    ``replace_last`` puts the label in the place of the weakest candidate, for the loss alone. Serving never shows such
    a set; the code that trains this head has gone over to leaving out.

    ``divide`` names the divisor: the weights of the slots that are ``covered``, known after the forward pass only, or
    of ``all`` valid slots, so that the term has the divisor of a base loss with the same decay. With ``replace_last``
    all valid slots are covered. None of these choices is published by the authors.

    Raises:
        ValueError: a choice is unknown.
    """

    name: ClassVar[str] = "candidate_cross_entropy"
    chooses: ClassVar[bool] = True

    def __init__(
        self,
        *,
        missing: Missing = "drop",  # a slot whose label is no candidate: drop, or replace_last
        divide: Divisor = "covered",  # by the weights of the covered slots, or of all valid ones
        decay: float | int | None = None,  # slots over which the weight falls to 1/e; null weighs all alike
        prefix: bool = False,  # count only the unbroken run of valid slots at the start of a block
        coefficient: float | int = 1.0,  # weight of the term in the sum
    ) -> None:
        super().__init__(decay=decay, coefficient=coefficient, view="main", prefix=prefix)
        if missing not in ("drop", "replace_last"):
            raise SettingError("loss.missing", f"{missing!r} is unknown", "Use 'drop' or 'replace_last'")
        if divide not in ("covered", "all"):
            raise SettingError("loss.divide", f"{divide!r} is unknown", "Use 'covered' or 'all'")
        self.missing: Missing = missing
        self.divide: Divisor = divide
        self.tallies = missing == "drop" and divide == "covered"

    def per_slot(self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None) -> Float[Tensor, "B N K"]:
        candidates, (place, there) = chosen_among(out), self._places(out, layout)
        scores = candidates.scores
        if self.missing == "replace_last":
            assert candidates.of_label is not None, "this head scores no token that is none of its candidates"
            last = torch.where(there, scores[..., -1], candidates.of_label)
            scores = torch.cat([scores[..., :-1], last[..., None]], dim=-1)
            place = torch.where(there, place, scores.shape[-1] - 1)
        scores = torch.where(layout.valid[..., None], scores, 0.0)
        return -scores.log_softmax(-1).gather(-1, place[..., None])[..., 0]

    def numerator(
        self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None, ctx: StepContext
    ) -> Float[Tensor, ""]:
        losses = self.per_slot(out, layout, teacher)
        return torch.where(self._covered(out, layout), self.weights(out, layout, teacher) * losses, 0.0).sum()

    def tally(self, out: HeadOutput, layout: BlockLayout) -> Float[Tensor, ""]:
        return torch.where(self._covered(out, layout), self.weights(out, layout, None), 0.0).sum()

    def _covered(self, out: HeadOutput, layout: BlockLayout) -> Bool[Tensor, "B N K"]:
        counted = self.counted(layout)
        return counted if self.missing == "replace_last" else counted & self._places(out, layout)[1]

    def _places(self, out: HeadOutput, layout: BlockLayout) -> tuple[Int[Tensor, "B N K"], Bool[Tensor, "B N K"]]:
        return place_of(layout.labels, chosen_among(out).ids)
