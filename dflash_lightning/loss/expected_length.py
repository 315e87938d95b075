"""Losses of a whole block: how many of its tokens verification accepts."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dflash_lightning.errors import SettingError
from dflash_lightning.loss.base import Labels, LossTerm, check_temperature, taught, unbroken
from dflash_lightning.loss.weighted import WeightedLoss
from dflash_lightning.loss.weights import WeightKind
from dflash_lightning.ops.lm_head import HeadOutput, LabelLogProb, Overlap, Teacher, TeacherLogProb
from dflash_lightning.types import BlockLayout, FeatureSpec, SlotTotals, StepContext

Part = Literal["both", "reach", "continuation"]
_FLOOR = -80.0  # of a logarithm; exp(-80) is a normal number in float32
_PARTS: dict[Part, WeightKind] = {"both": "label", "reach": "label_reach", "continuation": "label_continuation"}
_NEARLY_0 = 1e-3  # below it a power mean is its limit at 0: in float32 the formula would show rounding only


class DPace(WeightedLoss):
    """Cross entropy, each slot weighted by what its probability is worth for the accepted length now (D-PACE).

    ``s_k = (1 - alpha) q_k(label) + alpha`` (1 where a slot is not valid) is the smoothed chance that draft ``k`` is
    right, ``P_k`` the product of ``s`` up to ``k``, and ``w_k`` the sum of ``P_j`` over the valid slots ``j >= k``:
    the derivative of the expected length with respect to ``log s_k``. The loss is ``sum w_k * -log q_k(label)``, with
    ``w`` detached (arXiv 2605.18810). Its two factors are ``P_k``, how likely the slot is reached, and ``w_k / P_k``,
    what it opens; ``part`` weighs by one of them alone (the paper's ablations). ``alpha`` 1 gives weights Kp, Kp - 1,
    ..., 1 whatever the drafter says.

    Published code divides by different counts, which differ by three orders of magnitude. ``documents`` is the authors'
    (also SpecForge's at first; its later documents name ``document_mean``): with it gradients are large, and clipping
    at 1 always acts. ``slots`` is the number of valid slots (speculators). AngelSpec's sum of the weights depends on
    the forward pass and is left out.
    """

    name: ClassVar[str] = "d_pace"

    def __init__(
        self,
        *,
        alpha: float | int = 0.5,  # 0 counts a token as accepted with its probability, 1 always
        part: Part = "both",  # factors of the weight; one alone is an ablation
        normalize: Literal["documents", "slots", "blocks", "document_mean"] = "slots",  # what the sum is divided by
        coefficient: float | int = 1.0,  # weight of the term in the sum
        view: str = "main",  # which of the head's distributions is scored
    ) -> None:
        if part not in _PARTS:
            raise SettingError("loss.part", f"{part!r} is unknown", f"Use one of {list(_PARTS)}")
        self.part = part
        super().__init__(weight=_PARTS[part], alpha=alpha, normalize=normalize, coefficient=coefficient, view=view)


class BlockVerificationLoss(LossTerm):
    """The expected number of drafts that block verification accepts (BV loss, arXiv 2609.34832).

    With labels ``y`` drawn from the target, ``r_i`` the product of ``q_j(y_j) / p_j(y_j)`` over the first ``i`` drafts
    (``r_0 = 1``) and ``A_i`` the least of ``r_0 .. r_i``, the score of draft ``i`` is
    ``s_i = sum_v min(A_{i-1} p_i(v), r_{i-1} q_i(v))``, and the sum of the scores, in expectation over ``y``, is the
    number of drafts that block verification (arXiv 2403.10444) accepts. A block's loss is ``-log`` of the power mean of
    its scores with exponent ``beta``, and blocks are averaged. ``beta`` rises from 0 (mean of ``log s_i``) to 1 (log of
    the mean) over the first ``anneal`` of the training.

    Only the unbroken run of valid slots at the start of a block counts. The formula of ``s_i`` is proven by enumeration
    (tests). Power mean and annealing are RECONSTRUCTED from third-party code of the paper's appendix B.4; the paper's
    share of annealing and its mix with cross entropy are not known to us.
    """

    name: ClassVar[str] = "block_verification"
    labels: Labels = "samples"

    def __init__(
        self,
        *,
        temperature: float | int = 1.0,  # at which the labels were drawn, and at which decoding will sample
        anneal: float | int = 1.0,  # share of the training over which the power mean goes from 0 to 1; 0: 1 at once
        coefficient: float | int = 1.0,  # weight of the term in the sum
        view: str = "main",  # which of the head's distributions is scored
    ) -> None:
        if not 0 <= anneal <= 1:
            raise SettingError("loss.anneal", f"{anneal} is not a share of the training", "Use 0..1")
        self.temperature = check_temperature(temperature)
        self.anneal = float(anneal)
        self.coefficient = float(coefficient)
        self.view = view

    def required(self) -> FeatureSpec:
        return FeatureSpec(last_hidden=True)

    def numerator(
        self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None, ctx: StepContext
    ) -> Float[Tensor, ""]:
        counted = unbroken(layout)
        scores = self.scores(out, layout, taught(teacher), counted)
        log_scores = torch.where(counted, scores, 1.0).log().clamp(min=_FLOOR)
        numbers = counted.sum(-1)
        means = power_mean(log_scores, counted, self.beta(ctx))
        return torch.where(numbers > 0, -means, 0.0).sum()

    def denominator(self, totals: SlotTotals) -> Float[Tensor, ""]:
        return totals.prefix_valid[0]

    def beta(self, ctx: StepContext) -> float:
        """Exponent of the power mean at this step."""
        length = self.anneal * ctx.total_steps
        return 1.0 if length <= 0 else min(ctx.step / length, 1.0)

    def scores(
        self, out: HeadOutput, layout: BlockLayout, teacher: Teacher, counted: Bool[Tensor, "B N K"]
    ) -> Float[Tensor, "B N K"]:
        """``s_i`` at the slots ``counted``, in order; what stands at others means nothing."""
        view, labels, temperature = self.view_of(out), layout.labels, self.temperature
        log_q, log_p = view.ask(LabelLogProb(labels, temperature), TeacherLogProb(teacher, labels, temperature))
        ratios = torch.where(counted, log_q - log_p, 0.0)
        before = torch.nn.functional.pad(ratios.cumsum(-1)[..., :-1], (1, 0))  # log r_{i-1}
        least = before.cummin(-1).values  # log A_{i-1}; the first entry is 0
        a, b = (log.clamp(_FLOOR, -_FLOOR).exp() for log in (least, before))
        (scores,) = view.ask(Overlap(teacher, a, b, temperature))
        return scores


def power_mean(
    logs: Float[Tensor, "*blocks K"], counted: Bool[Tensor, "*blocks K"], beta: float
) -> Float[Tensor, "*blocks"]:
    """``(1/beta) log mean exp(beta * logs)`` over the counted slots of each block; at 0 their mean. 0 without any."""
    number = counted.sum(-1).clamp(min=1)
    if beta < _NEARLY_0:
        return torch.where(counted, logs, 0.0).sum(-1) / number
    some = counted.any(-1, keepdim=True)
    scaled = torch.where(counted, beta * logs, -torch.inf)
    total = torch.where(some, scaled, 0.0).logsumexp(-1)
    return torch.where(some.squeeze(-1), (total - number.log()) / beta, 0.0)
