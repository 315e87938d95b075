"""Position-wise marginals: every slot's distribution comes from its own hidden state alone."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.head.base import DraftHead, HeadOutput
from dflash_lightning.ops.lm_head import LanguageHead, View
from dflash_lightning.types import BlockLayout, Scores


class MarginalHead(DraftHead):
    """The target's own language head on the drafter's hidden states; no weights (DFlash, arXiv 2602.06036 sec. 4.1)."""

    name: ClassVar[str] = "marginal"
    per_slot: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()

    def build(self, config: DraftConfig) -> None:
        """Nothing to make: the head is the target's."""

    def outputs(self, hidden: Float[Tensor, "B N K H"], layout: BlockLayout, lm: LanguageHead) -> HeadOutput:
        return HeadOutput({"main": View.of(hidden, layout.rows, lm)})

    def open(self, hidden: Float[Tensor, "B D H"], roots: Int[Tensor, " B"], lm: LanguageHead) -> Scores:
        return Scores(lm.logits(hidden), lm.ids)
