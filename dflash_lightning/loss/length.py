"""What trains a head's guess of how much of a block will stand (AdaFlash, arXiv 2607.19223)."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_lightning.errors import SettingError
from dflash_lightning.loss.base import LossTerm, unbroken
from dflash_lightning.loss.weights import first_failure
from dflash_lightning.ops.lm_head import Argmax, HeadOutput, Teacher
from dflash_lightning.types import BlockLayout, SlotTotals, StepContext


class LengthLoss(LossTerm):
    """Mean over blocks of ``(length - (accepted + 1) / B)^2``; ``length`` is the head's signal, ``[B, N]``.

    ``accepted`` counts the drafts of a block that are the likeliest ones of the head and the data's own tokens, up to
    the first that is not, or that has no label. ``B`` counts the drafts and the root: all accepted is a target of 1.
    A block whose first slot has no label is left out.

    From the released code (MD L3, "direct length"). Its other mode, a threshold for the product of confidences, is not
    here.
    """

    name: ClassVar[str] = "length"
    by_block: ClassVar[bool] = True

    def __init__(
        self,
        *,
        signal: str = "length",  # which of the head's signals is trained: a number from 0 to 1 per block
        coefficient: float | int = 1.0,  # weight of the term in the sum
        view: str = "main",  # the distribution whose drafts are meant
    ) -> None:
        if not signal:
            raise SettingError("loss.signal", "no signal is named", "Use 'length'")
        self.signal = signal
        self.coefficient = float(coefficient)
        self.view = view
        self.reads = (signal,)

    def numerator(
        self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None, ctx: StepContext
    ) -> Float[Tensor, ""]:
        counted = unbroken(layout)
        # A block that is not counted may hold anything: select, so that no NaN enters a gradient.
        guess = torch.where(counted.any(-1), out.signals[self.signal].float(), 0.5)
        errors = (guess - self.share(out, layout)) ** 2
        return torch.where(counted.any(-1), errors, 0.0).sum()

    def denominator(self, totals: SlotTotals) -> Float[Tensor, ""]:
        return totals.prefix_valid[0]

    def share(self, out: HeadOutput, layout: BlockLayout) -> Float[Tensor, "B N"]:
        """``(accepted + 1) / B`` of every block."""
        counted = unbroken(layout)
        (drafts,) = self.view_of(out).ask(Argmax())
        slots = torch.arange(drafts.shape[-1], device=drafts.device)
        stand = counted & (slots < first_failure(drafts == layout.labels, counted))
        return (stand.sum(-1) + 1).float() / (layout.predicts.sum(-1) + 1).float()
