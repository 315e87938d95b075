"""Reverse KL whose slots are capped, so that a token which the target all but excludes does not rule a step."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_lightning.errors import SettingError
from dflash_lightning.loss.base import Teacher
from dflash_lightning.loss.weighted import WeightedLoss
from dflash_lightning.ops.lm_head import HeadOutput
from dflash_lightning.types import BlockLayout


class ClippedReverseKL(WeightedLoss):
    """``sum(w_j * min(T^2 KL(q_j, p_j), clip)) / sum(w_j)``: the reverse KL of ``Divergence``, capped slot by slot.

    The mode-seeking half of AdaFlash's loss (arXiv 2607.19223). A slot at its cap has no gradient. The released code
    divides by the sum of the weights *before* it caps at .01, and multiplies with the weights after that. So its cap,
    in nats, is .01 times that sum: .066 for one block of it and 34 for 512, and means something else for every batch
    size. ``per_batch`` does the same (with the sum over the micro-batch, as there). Without it ``clip`` is in nats.
    """

    name: ClassVar[str] = "clipped_reverse_kl"

    def __init__(
        self,
        *,
        clip: float | int | None = None,  # the most that a slot may lose, in nats; null caps nothing
        per_batch: bool = False,  # clip is a share of the sum of the weights of the micro-batch, as in released code
        temperature: float | int = 1.0,  # divides the logits of both laws
        decay: float | int | None = None,  # slots over which the weight falls to 1/e; null weighs all alike
        coefficient: float | int = 1.0,  # weight of the term in the sum
        view: str = "main",  # which of the head's distributions is scored
    ) -> None:
        if clip is not None and not clip > 0:
            raise SettingError("loss.clip", f"{clip} leaves no loss", "Use a positive number, or null")
        super().__init__(
            loss="reverse_kl",
            labels="target",
            temperature=temperature,
            decay=decay,
            normalize="weights",
            coefficient=coefficient,
            view=view,
        )
        self.clip = None if clip is None else float(clip)
        self.per_batch = per_batch

    def per_slot(self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None) -> Float[Tensor, "B N K"]:
        losses = super().per_slot(out, layout, teacher)
        if self.clip is None:
            return losses
        cap = torch.full((), self.clip, device=losses.device)
        if self.per_batch:
            counted = self.counted(layout)
            cap = cap * torch.where(counted, self.weights(out, layout, teacher), 0.0).sum()
        return torch.minimum(losses, cap.to(losses.dtype))
