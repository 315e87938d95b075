"""How likely the nodes of a tree are to be reached, taught along the training text (TAPS, arXiv 2606.00487)."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_lightning.loss.base import Normalize, SlotwiseLoss, check_normalize, unbroken
from dflash_lightning.ops.lm_head import HeadOutput, LabelLogProb, Teacher
from dflash_lightning.types import BlockLayout

_LEAST = 1e-6  # of a probability: the logarithm of less is no number to learn from in fp32


class ReachLoss(SlotwiseLoss):
    """Binary cross-entropy of the probability that a path is reached, at every slot: ``-log R_k - log(1 - W_k)``.

    ``a_j`` is the view's probability of the label of slot ``j`` after the label before it, ``R_k = a_1 .. a_k`` that of
    the text's own path, which should be reached, and ``W_k = R_{k-1} (1 - a_k)`` that of all its siblings at the slot,
    which should not. Only the unbroken run of valid slots at the start of a block is a path.

    RECONSTRUCTED: the paper's term is over logged nodes of the verifier; this one is over one path and what leaves it,
    under teacher forcing.
    """

    name: ClassVar[str] = "reach"

    def __init__(
        self,
        *,
        decay: float | int | None = None,  # slots over which the weight falls to 1/e; null weighs all alike
        normalize: Normalize = "weights",  # divisor: weights, slots, blocks, documents or document_mean
        coefficient: float | int = 1.0,  # weight of the term in the sum
        view: str = "main",  # the distribution that rates edges
    ) -> None:
        super().__init__(decay=decay, coefficient=coefficient, view=view, prefix=True)
        check_normalize(normalize)
        self.normalize = normalize

    def per_slot(self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None) -> Float[Tensor, "B N K"]:
        (log_prob,) = self.view_of(out).ask(LabelLogProb(layout.labels))
        edges = torch.where(unbroken(layout), log_prob.float(), 0.0)
        reached = edges.cumsum(-1)
        strayed = ((reached - edges).exp() - reached.exp()).clamp(0.0, 1.0 - _LEAST)
        return -reached - (-strayed).log1p()
