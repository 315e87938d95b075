"""The marginals of every slot, and a guess of how far a draft will stand (VAT, arXiv 2608.30135)."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.head.base import HeadOutput
from dflash_lightning.head.marginal import MarginalHead
from dflash_lightning.ops.lm_head import LanguageHead
from dflash_lightning.types import BlockLayout, Scores

CONFIDENCE = "confidence"


class SurvivalHead(MarginalHead):
    """Drafts as ``MarginalHead`` does, and offers the signal ``confidence`` [B, N, K]: ``sigmoid(u h_k + b)``.

    ``h_k`` is the slot's hidden state after the drafter's last norm (the paper's side of the norm is not known to us).
    Trained with ``ConfidenceLoss(label=survival)`` it is the chance that all drafts up to ``k`` stand, and its gradient
    goes on into the drafter, which is the point of it. It knows no drafted token, so a policy may cut by it under
    rejection as well; such a policy compares it as it is, never a running product. ``u`` and ``b`` start at 0, where
    every chance is 1/2 and the drafter gets no gradient yet (our choice).
    """

    name: ClassVar[str] = "survival"
    signals = (CONFIDENCE,)

    def build(self, config: DraftConfig) -> None:
        self.survive = nn.Linear(config.hidden_size, 1)
        nn.init.zeros_(self.survive.weight)
        nn.init.zeros_(self.survive.bias)

    def outputs(self, hidden: Float[Tensor, "B N K H"], layout: BlockLayout, lm: LanguageHead) -> HeadOutput:
        return HeadOutput(super().outputs(hidden, layout, lm).views, self._signals(hidden))

    def open(self, hidden: Float[Tensor, "B D H"], roots: Int[Tensor, " B"], lm: LanguageHead) -> Scores:
        return Scores(lm.logits(hidden), lm.ids, self._signals(hidden))

    def _signals(self, hidden: Float[Tensor, "*lanes H"]) -> dict[str, Tensor]:
        """In fp32: in half precision all that is nearly certain would be certain."""
        return {CONFIDENCE: self.survive(hidden)[..., 0].float().sigmoid()}
