"""The loss of DFlash: cross entropy with the next token, early drafts weighing more."""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from dflash_lightning.errors import SettingError
from dflash_lightning.loss.base import SlotwiseLoss, taught
from dflash_lightning.ops.lm_head import HeadOutput, LabelLogProb, Teacher
from dflash_lightning.types import BlockLayout, FeatureSpec


class CrossEntropy(SlotwiseLoss):
    """``sum(w_j * -log q_j(y_j)) / sum(w_j)`` over all drafts ``j`` of all blocks (DFlash, arXiv 2602.06036 sec. 4.2).

    - ``q_j`` is the drafter's distribution of the token at draft ``j``, counted from 0 in its block.
    - ``y_j``, the label, is the token that stands there in the training row. With ``labels: target`` it is the token
      that the target itself finds likeliest after the row's tokens, which is what greedy decoding accepts (a term of
      AdaFlash, arXiv 2607.19223). The row's own tokens then serve as context only.
    - ``w_j = exp(-j / decay)``. A wrong first draft loses the whole block, a wrong last one a single token.

    Only valid drafts count: those whose token the training row supervises. ``SlotwiseLoss`` sums and counts them; the
    divisor is counted over all ranks and the whole accumulation window. Slots are counted by the row's labels in both
    cases: where a reduced draft vocabulary lacks the target's token, the slot is counted and teaches nothing.
    """

    name: ClassVar[str] = "cross_entropy"

    def __init__(
        self,
        *,
        decay: float | int | None = None,  # slots over which the weight falls to 1/e; null weighs all alike
        labels: Literal["data", "target"] = "data",  # the row's own token, or the one that the target finds likeliest
        prefix: bool = False,  # count only the unbroken run of valid slots at the start of a block
        coefficient: float | int = 1.0,  # weight of the term in the sum
        view: str = "main",  # which of the head's distributions is scored
    ) -> None:
        super().__init__(decay=decay, coefficient=coefficient, view=view, prefix=prefix)
        if labels not in ("data", "target"):
            raise SettingError("loss.labels", f"{labels!r} is unknown", "Use 'data' or 'target'")
        self.labels = labels

    def per_slot(self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None) -> Float[Tensor, "B N K"]:
        labels = taught(teacher).labels() if self.labels == "target" else layout.labels
        (log_prob,) = self.view_of(out).ask(LabelLogProb(labels))  # chunk by chunk: never [B, N, K, V]
        return -log_prob

    def required(self) -> FeatureSpec:
        return FeatureSpec(last_hidden=self.labels == "target")

    def laws(self) -> tuple[float, ...]:
        return ()
