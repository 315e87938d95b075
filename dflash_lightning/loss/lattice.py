"""The loss of a head that walks through candidates: which of them is the label, given the true one before."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dflash_lightning.errors import SettingError
from dflash_lightning.loss.base import LossTerm, taught
from dflash_lightning.ops.candidates import Candidates, place_of
from dflash_lightning.ops.lm_head import HeadOutput, Teacher
from dflash_lightning.types import BlockLayout, FeatureSpec, SlotTotals, StepContext


class LatticeLoss(LossTerm):
    """Cross-entropy, margin and penalty over the candidates of a slot (LiLiCorr, arXiv 2608.20530; MH 1.3).

    ``z`` are the scores of a slot's candidates after the *true* candidate of the slot before, ``g`` is the place of the
    label among them, ``t`` are the target's own logits of the candidates. A slot gives

    - ``-log softmax(z)[g]``;
    - ``max(0, margin - (z[g] - the best other z))``, 0 where there is no other;
    - ``sum_j softmax(z)[j] max(0, t[g] - t[j])``: what is lost on average of the target's logit, without gradient to t.

    Slots count up to the first whose label is no candidate, and only in blocks whose slots are all valid. All count
    alike: the sum is divided by their number over all ranks, known after the forward pass only. (The code that the
    paper came with divides per rank, as far as it was read.)

    Raises:
        ValueError: a weight is negative, or all are 0.
    """

    name: ClassVar[str] = "lattice"
    chooses: ClassVar[bool] = True
    tallies = True
    view = "main"

    def __init__(
        self,
        *,
        cross_entropy: float | int = 0.25,  # weight of the cross-entropy
        hinge: float | int = 0.0,  # weight of the margin loss
        penalty: float | int = 0.25,  # weight of what is lost of the target's logit; 0 needs no teacher
        margin: float | int = 2.0,  # by how much the label's score should beat every other
        coefficient: float | int = 1.0,  # weight of the term in the sum
    ) -> None:
        self.cross_entropy, self.hinge, self.penalty = float(cross_entropy), float(hinge), float(penalty)
        self.margin = float(margin)
        self.coefficient = float(coefficient)
        weights = {name: getattr(self, name) for name in ("cross_entropy", "hinge", "penalty")}
        for name, weight in weights.items():
            if weight < 0:
                raise SettingError(f"loss.{name}", f"{weight} would teach the opposite", "Use 0 or more")
        if not any(weights.values()):
            raise SettingError(
                "loss.cross_entropy", "all weights of the term are 0", "Use one above 0, or no such term"
            )

    def required(self) -> FeatureSpec:
        return FeatureSpec(last_hidden=self.penalty > 0)

    def laws(self) -> tuple[float, ...]:
        return ()  # it reads logits of a few tokens, and no law

    def numerator(
        self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None, ctx: StepContext
    ) -> Float[Tensor, ""]:
        candidates, counted = chosen_among(out), walked(out, layout)
        place, _ = place_of(layout.labels, candidates.ids)
        scores = torch.where(counted[..., None], candidates.scores, 0.0)
        loss = torch.zeros_like(scores[..., 0])
        if self.cross_entropy:
            loss = loss - self.cross_entropy * _at(scores.log_softmax(-1), place)
        if self.hinge and scores.shape[-1] > 1:
            others = scores.scatter(-1, place[..., None], -torch.inf).amax(-1)
            loss = loss + self.hinge * (self.margin - (_at(scores, place) - others)).clamp(min=0.0)
        if self.penalty:
            own = taught(teacher).logits_at(candidates.ids.clamp(min=0))
            lost = (_at(own, place)[..., None] - own).clamp(min=0.0)
            loss = loss + self.penalty * (scores.softmax(-1) * lost).sum(-1)
        return torch.where(counted, loss, 0.0).sum()

    def tally(self, out: HeadOutput, layout: BlockLayout) -> Float[Tensor, ""]:
        return walked(out, layout).sum().float()

    def denominator(self, totals: SlotTotals) -> Float[Tensor, ""]:
        return totals.prefix_valid.sum()


def chosen_among(out: HeadOutput) -> Candidates:
    """The candidates of a head that has some (``check_signals`` has looked)."""
    assert out.candidates is not None, "this head chooses among all tokens"
    return out.candidates


def walked(out: HeadOutput, layout: BlockLayout) -> Bool[Tensor, "B N K"]:
    """Slots of wholly valid blocks up to the first whose label is no candidate, that one left out."""
    _, there = place_of(layout.labels, chosen_among(out).ids)
    whole = layout.keep & (layout.valid | ~layout.predicts).all(-1)
    return (there | ~layout.predicts).cumprod(-1).bool() & layout.predicts & whole[..., None]


def _at(values: Float[Tensor, "B N K k"], place: Int[Tensor, "B N K"]) -> Float[Tensor, "B N K"]:
    return values.gather(-1, place[..., None])[..., 0]
