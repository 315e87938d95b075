"""What a slot of a block loses: one number for each, from which ``WeightedLoss`` makes its sum.

q is the drafter's distribution ("law") of the slot's token and p the target's, both at ``temperature`` T; y is the
slot's label. ``a = sum_v min(p(v), q(v))``, their overlap, is the chance that a draft of the slot is accepted. Losses
of whole laws are multiplied by ``T^2``: gradients are of one size whatever T is (Hinton et al., arXiv 1503.02531).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_lightning.loss.weights import Block
from dflash_lightning.ops.lm_head import JSD, KL, LabelLogProb, Overlap, Renyi, Request, SoftLabelLogProb

Loss = Literal["ce", "soft_ce", "forward_kl", "reverse_kl", "jsd", "tv", "nla", "renyi", "lk_hybrid"]
_LEAST = 1e-5  # of an overlap: below it there is nothing to gain from a slot, and its gradient would be noise


@dataclass(frozen=True)
class SlotLoss:
    """What is asked of a head's view, and the loss [B N K] made of the answers: ``make(answers, temperature, eta)``."""

    ask: Callable[[Block], Sequence[Request]]
    make: Callable[..., Float[Tensor, "B N K"]]
    reads_law: bool = True  # whether p is read


def _label(block: Block) -> Sequence[Request]:
    return (LabelLogProb(block.labels, block.temperature),)


def _soft_label(block: Block) -> Sequence[Request]:
    return (SoftLabelLogProb(block.law, block.temperature),)


def _forward_kl(block: Block) -> Sequence[Request]:
    return (KL(block.law, False, block.temperature),)


def _reverse_kl(block: Block) -> Sequence[Request]:
    return (KL(block.law, True, block.temperature),)


def _jsd(block: Block) -> Sequence[Request]:
    return (JSD(block.law, block.temperature),)


def _renyi(block: Block) -> Sequence[Request]:
    return (Renyi(block.law, block.temperature),)


def _overlap(block: Block) -> Sequence[Request]:
    return (Overlap(block.law, temperature=block.temperature),)


def _hybrid(found: Sequence[Tensor], temperature: float, eta: float) -> Float[Tensor, "B N K"]:
    divergence, overlap = found
    share = torch.exp(-eta * overlap.detach())
    return share * divergence * temperature**2 + (1.0 - share) * (1.0 - overlap)


SLOT_LOSSES: dict[str, SlotLoss] = {
    # -log q(y)
    "ce": SlotLoss(_label, lambda found, t, eta: -found[0], reads_law=False),
    # -sum p log q
    "soft_ce": SlotLoss(_soft_label, lambda found, t, eta: -found[0] * t**2),
    # sum p log(p / q): q must cover whatever p does.
    "forward_kl": SlotLoss(_forward_kl, lambda found, t, eta: found[0] * t**2),
    # sum q log(q / p): q may settle on one of p's modes.
    "reverse_kl": SlotLoss(_reverse_kl, lambda found, t, eta: found[0] * t**2),
    # The mean divergence of both from their mean, at most log 2.
    "jsd": SlotLoss(_jsd, lambda found, t, eta: found[0] * t**2),
    # -2 log sum sqrt(p q)
    "renyi": SlotLoss(_renyi, lambda found, t, eta: found[0] * t**2),
    # 1 - a: the chance that a draft is rejected.
    "tv": SlotLoss(_overlap, lambda found, t, eta: 1.0 - found[0]),
    # -log a: its gradient is that of tv divided by a (LK-alpha, arXiv 2602.23881). Overlaps below 1e-5 count as 1e-5,
    # as in published code.
    "nla": SlotLoss(_overlap, lambda found, t, eta: -found[0].clamp(min=_LEAST).log()),
    # s KL(p, q) + (1 - s) (1 - a) with s = exp(-eta a), slot by slot (same paper; other code takes one s per batch).
    "lk_hybrid": SlotLoss(lambda block: (*_forward_kl(block), *_overlap(block)), _hybrid),
}
