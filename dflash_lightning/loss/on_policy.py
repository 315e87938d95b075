"""Towards the target on committed tokens, away from the drafter's own rejected ones (Draft-OPD, arXiv 2605.29343)."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dflash_lightning.errors import SettingError
from dflash_lightning.loss.base import LossTerm, Teacher
from dflash_lightning.ops.lm_head import HeadOutput, LabelLogProb
from dflash_lightning.types import BlockLayout, SlotTotals, StepContext

_FLOOR, _MOST = -10.0, 10.0  # of a log-probability, and of what a slot loses
_NEARLY_1 = -1e-6  # log-probability from which a token counts as certain: log(1 - Q) must stay finite


class OnPolicyLoss(LossTerm):
    """``(w+ sum l+ + w- sum g^(k-1) l-) / (w+ n+ + w- sum g^(k-1))`` over blocks of rounds that were decoded for real.

    With ``s = log q(x)`` of the drafter, live, and ``t = log p(x)`` of the target, as its rounds recorded it, both at
    least -10:

    - at a committed token ``x``: ``l+ = P (t - s) + (1 - P) (log(1 - P) - log(1 - Q))`` with ``P = e^t``, ``Q = e^s``,
      the forward KL of the event "is x";
    - at a rejected draft ``x`` in place ``k``: ``l- = e^(t-s) - (t-s) - 1``, which pushes ``q(x)`` down where it is
      above ``p(x)``.

    Both are 0 where P = Q, never negative, and capped at 10. It reads the streams of ``block=recorded``. A rejected
    draft of greedy decoding is the likeliest one and no draw, so ``l-`` is no estimate of ``KL(q, p)``.

    From the released code (MH 3.2). The variant on whole laws (MH 3.3) is not here. With a head whose laws depend on
    drafted tokens a rejected draft would have to be judged after the drafts before it; here it is judged after the
    data's tokens. Use it with heads without steps.
    """

    name: ClassVar[str] = "on_policy"
    tallies = True

    def __init__(
        self,
        *,
        committed: float | int = 1.0,  # w+: weight of committed tokens
        rejected: float | int = 1.0,  # w-: weight of rejected drafts
        fade: float | int = 0.8,  # g: what a place further weighs among rejected drafts
        coefficient: float | int = 1.0,  # weight of the term in the sum
        view: str = "main",  # which of the head's distributions is scored
    ) -> None:
        if committed < 0 or rejected < 0 or not committed + rejected > 0:
            raise SettingError(
                "loss.committed", f"weights {committed} and {rejected} teach nothing", "Use 0 or more, not both 0"
            )
        if not 0 < fade <= 1:
            raise SettingError("loss.fade", f"{fade} is no factor from place to place", "Use above 0, at most 1 (0.8)")
        self.committed = float(committed)
        self.rejected = float(rejected)
        self.fade = float(fade)
        self.coefficient = float(coefficient)
        self.view = view

    def numerator(
        self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None, ctx: StepContext
    ) -> Float[Tensor, ""]:
        learnt, tokens, weights = self._streams(layout)
        log_q, log_r = self.view_of(out).ask(LabelLogProb(layout.labels), LabelLogProb(tokens))
        towards = torch.where(learnt, committed_loss(log_q, _known(layout, "teacher", learnt)), 0.0)
        counted = weights > 0
        away = torch.where(counted, rejected_loss(log_r, _known(layout, "rejected_teacher", counted)), 0.0)
        return self.committed * towards.sum() + self.rejected * (weights * away).sum()

    def denominator(self, totals: SlotTotals) -> Float[Tensor, ""]:
        return (self.committed + self.rejected) * totals.valid.sum()

    def tally(self, out: HeadOutput, layout: BlockLayout) -> Float[Tensor, ""]:
        learnt, _, weights = self._streams(layout)
        return self.committed * learnt.sum() + self.rejected * weights.sum()

    def _streams(self, layout: BlockLayout) -> tuple[Bool[Tensor, "B N K"], Tensor, Float[Tensor, "B N K"]]:
        """Slots with a committed token, rejected tokens (any id where there is none), and what those weigh."""
        given = layout.streams
        if "rejected" not in given:
            learnt = torch.zeros_like(layout.valid) | layout.valid
            return learnt, torch.zeros_like(layout.labels), torch.zeros(learnt.shape, device=learnt.device)
        place = (layout.predicts.cumsum(-1) - 1).clamp(min=0)
        there = (given["rejected"] >= 0) & layout.scored
        weights = torch.where(there, self.fade ** place.float(), 0.0)
        return layout.valid & (given["teacher"] <= 0), given["rejected"].clamp(min=0), weights


def _known(layout: BlockLayout, name: str, where: Bool[Tensor, "B N K"]) -> Float[Tensor, "B N K"]:
    """The target's log-probabilities where they count, and certainty elsewhere."""
    if name not in layout.streams:
        return torch.zeros(where.shape, device=where.device)
    return torch.where(where, layout.streams[name], 0.0)


def committed_loss(log_q: Float[Tensor, "*slots"], log_p: Float[Tensor, "*slots"]) -> Float[Tensor, "*slots"]:
    """The forward KL of the event that the token is the committed one."""
    s, t = (x.clamp(min=_FLOOR, max=_NEARLY_1) for x in (log_q, log_p))
    chance = t.exp()
    other = (1.0 - chance) * ((-torch.expm1(t)).log() - (-torch.expm1(s)).log())
    return (chance * (t - s) + other).clamp(-_MOST, _MOST)


def rejected_loss(log_q: Float[Tensor, "*slots"], log_p: Float[Tensor, "*slots"]) -> Float[Tensor, "*slots"]:
    """``r - log r - 1`` with ``r = p / q``: 0 where the two agree, with a slope that brings q to p."""
    ratio = log_p.clamp(min=_FLOOR) - log_q.clamp(min=_FLOOR)
    return (ratio.exp() - ratio - 1.0).clamp(-_MOST, _MOST)
