"""The marginals of every slot, and a guess of how much of the block will stand (AdaFlash, arXiv 2607.19223)."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.errors import SettingError
from dflash_lightning.head.base import HeadOutput
from dflash_lightning.head.marginal import MarginalHead
from dflash_lightning.ops.lm_head import LanguageHead
from dflash_lightning.types import BlockLayout, Scores

LENGTH = "length"


class LengthHead(MarginalHead):
    """Drafts as ``MarginalHead`` does, and offers the signal ``length`` ``[B, N]``: the useful share of each block.

    ``x = [mean of h_k ; last h_k]`` over the slots that predict, ``y = SiLU(W_1 x + b_1)``, and the signal is
    ``sigmoid(w (y + SiLU(W_2 y + b_2)) + b)``. Trained with ``LengthLoss`` it guesses ``(accepted + 1) / B``, where
    ``B`` counts the drafts and the root. The hidden states are detached: the drafter does not know of it. They are
    made before any draft is drawn, so a policy may cut by the signal under rejection as well.

    From the released code (MT 6.7, MD L3). RECONSTRUCTED: its mean is over the block; here the root's own slot, which
    predicts nothing in some layouts, is left out, since decoding does not hand it on.
    """

    name: ClassVar[str] = "length"
    signals = (LENGTH,)

    def __init__(self, *, width: int = 256) -> None:  # numbers between the hidden states and the guess
        super().__init__()
        if width < 1:
            raise SettingError("head.width", f"{width} knows nothing of a block", "Use 1 or more (AdaFlash uses 256)")
        self.width = width

    def build(self, config: DraftConfig) -> None:
        self._first = config.alignment.first_slot
        self.read = nn.Linear(2 * config.hidden_size, self.width)
        self.deepen = nn.Linear(self.width, self.width)
        self.guess = nn.Linear(self.width, 1)

    def outputs(self, hidden: Float[Tensor, "B N K H"], layout: BlockLayout, lm: LanguageHead) -> HeadOutput:
        views = super().outputs(hidden, layout, lm).views
        return HeadOutput(views, {LENGTH: self.length(hidden[:, :, self._first :])})

    def open(self, hidden: Float[Tensor, "B D H"], roots: Int[Tensor, " B"], lm: LanguageHead) -> Scores:
        return Scores(lm.logits(hidden), lm.ids, {LENGTH: self.length(hidden)})

    def length(self, hidden: Float[Tensor, "*blocks D H"]) -> Float[Tensor, "*blocks"]:
        """The guess of each block, in fp32: in half precision all that is nearly certain would be certain."""
        hidden = hidden.detach()
        read = self.read(torch.cat([hidden.mean(-2), hidden[..., -1, :]], dim=-1))
        first = nn.functional.silu(read)
        deep = first + nn.functional.silu(self.deepen(first))
        return self.guess(deep)[..., 0].float().sigmoid()
