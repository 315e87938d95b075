"""What a slot of a block is worth, given how the drafter does now. No weight carries a gradient.

Everywhere ``counted`` marks the slots that a loss counts. A slot that is not counted is a hole: it weighs 0, it stops
no chain of products, and it is never a failure. Weights of a new drafter are almost 0 where they are products of plain
chances (``label`` and ``overlap`` with alpha 0, ``target``): begin with a trained one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dflash_lightning.loss.base import slot_weights, taught
from dflash_lightning.ops.lm_head import Argmax, Detached, LabelLogProb, Overlap, Request, Teacher, TeacherLogProb
from dflash_lightning.schedule import decay_weights
from dflash_lightning.types import BlockLayout

WeightKind = Literal["decay", "label", "label_reach", "label_continuation", "overlap", "auf", "vat", "target"]


def _products(chances: Float[Tensor, "*blocks K"], counted: Bool[Tensor, "*blocks K"]) -> Float[Tensor, "*blocks K"]:
    """The product of ``chances`` over the counted slots up to each slot, itself among them."""
    return torch.where(counted, chances, 1.0).cumprod(-1)


def reach(chances: Float[Tensor, "*blocks K"], counted: Bool[Tensor, "*blocks K"]) -> Float[Tensor, "*blocks K"]:
    """``P_k``: the product of ``chances`` over the counted slots up to ``k``, itself among them; 0 at other slots."""
    return torch.where(counted, _products(chances, counted), 0.0)


def suffix(chances: Float[Tensor, "*blocks K"], counted: Bool[Tensor, "*blocks K"]) -> Float[Tensor, "*blocks K"]:
    """``W_k``: the sum over counted slots ``j >= k`` of the product of ``chances`` up to ``j``.

    It is the derivative of ``sum_j prod_{i <= j} chances_i``, the expected length, with respect to ``log chances_k``.
    """
    return torch.where(counted, reach(chances, counted).flip(-1).cumsum(-1).flip(-1), 0.0)


def continuation(chances: Float[Tensor, "*blocks K"], counted: Bool[Tensor, "*blocks K"]) -> Float[Tensor, "*blocks K"]:
    """``W_k / P_k``, what a right slot opens however likely it is reached: ``1 + chances_{k+1} (1 + ...)``."""
    found = torch.zeros_like(chances[..., 0])
    opened = []
    for chance, counts in zip(chances.flip(-1).unbind(-1), counted.flip(-1).unbind(-1), strict=True):
        opened.append(torch.where(counts, 1.0 + found, 0.0))
        found = torch.where(counts, chance * (1.0 + found), found)
    return torch.stack(opened[::-1], -1)


def first_failure(ok: Bool[Tensor, "*blocks K"], counted: Bool[Tensor, "*blocks K"]) -> Int[Tensor, "*blocks 1"]:
    """Index of the first counted slot that is not ``ok``; ``K`` where there is none."""
    slots = torch.arange(ok.shape[-1], device=ok.device)
    return torch.where(counted & ~ok, slots, ok.shape[-1]).amin(-1, keepdim=True)


@dataclass(frozen=True)
class Block:
    """What losses and weights of slots are made from: a layout [B N K], its labels, and the teacher if there is one.

    ``target_labels`` says whose tokens are the labels: the target's likeliest ones, or the data's own.
    """

    layout: BlockLayout
    teacher: Teacher | None
    target_labels: bool
    temperature: float

    @property
    def law(self) -> Teacher:
        """The teacher, which must be there."""
        return taught(self.teacher)

    @property
    def labels(self) -> Int[Tensor, "B N K"]:
        """The token that each slot is taught."""
        return self.law.labels() if self.target_labels else self.layout.labels

    @property
    def order(self) -> Int[Tensor, "B N K"]:
        """The place of each slot among the predicting ones of its block, from 0; valid or not."""
        return (self.layout.predicts.cumsum(-1) - 1).clamp(min=0)


Weigh = Callable[..., Float[Tensor, "B N K"]]


@dataclass(frozen=True)
class Weight:
    """How slots are weighed: what is asked of the view, and the weights [B N K] made of the answers.

    ``weigh(answers, block, counted, alpha, decay)``. ``reads`` says what of the target is read: its whole law, its
    likeliest tokens, or nothing. ``smoothed`` weights have an ``alpha``, ``decays`` ones a ``decay``.
    """

    ask: Callable[[Block], Sequence[Request]]
    weigh: Weigh
    reads: str = "nothing"
    smoothed: bool = False
    decays: bool = False


def _smooth(chances: Tensor, alpha: float) -> Tensor:
    return (1.0 - alpha) * chances + alpha


def _by_label(of: Callable[[Tensor, Tensor], Tensor]) -> Weight:
    """A weight made by ``of`` from the smoothed chances of the labels."""
    return Weight(
        lambda b: (Detached(LabelLogProb(b.labels, b.temperature)),),
        lambda found, b, m, alpha, decay: of(_smooth(found[0].exp(), alpha), m),
        smoothed=True,
    )


def _until_failure(ok: Tensor, block: Block, counted: Tensor, decay: float | None) -> Tensor:
    slots = torch.arange(ok.shape[-1], device=ok.device)
    kept = (slots <= first_failure(ok, counted)).to(torch.float32)
    return kept * slot_weights(block.layout.predicts, decay)


def _after_failure(ok: Tensor, block: Block, counted: Tensor, decay: float | None) -> Tensor:
    size, order = ok.shape[-1], block.order
    failed = first_failure(ok, counted)
    place = torch.where(failed < size, order.gather(-1, failed.clamp(max=size - 1)), size)
    return decay_weights(size, decay, device=ok.device)[(order - place).clamp(min=0)]


def _reached(chances: Tensor, counted: Tensor) -> Tensor:
    return torch.nn.functional.pad(_products(chances, counted)[..., :-1], (1, 0), value=1.0)


WEIGHTS: dict[str, Weight] = {
    # exp(-j / decay) by place alone (DFlash).
    "decay": Weight(lambda b: (), lambda _, b, m, alpha, decay: slot_weights(b.layout.predicts, decay), decays=True),
    # The worth of a slot for the expected length: the derivative of sum_j prod_{i <= j} s_i with respect to log s_k,
    # with s = (1 - alpha) q(y) + alpha. D-PACE (arXiv 2605.18810) has alpha .5. With loss ce and alpha 0 the gradient
    # of the sum is that of -sum_j prod_{i <= j} q_i(y_i) exactly (EAL, arXiv 2609.24150, RECONSTRUCTED from its
    # abstract); above 0 it is that of nothing.
    "label": _by_label(suffix),
    # Its two factors, each alone (D-PACE's ablations): P_k, the product of s up to k, and W_k / P_k, what a right slot
    # opens.
    "label_reach": _by_label(reach),
    "label_continuation": _by_label(continuation),
    # The same by the chance of acceptance a in place of q(y): with loss renyi D-PARD, with nla DPALA (SpecForge's
    # documents), with nla and alpha 0 window total variation (WTV, arXiv 2609.24150, RECONSTRUCTED from its abstract;
    # AngelSpec's end-to-end TV), whose gradient is that of -sum_j prod_{i <= j} a_i.
    "overlap": Weight(
        lambda b: (Detached(Overlap(b.law, temperature=b.temperature)),),
        lambda found, b, m, alpha, decay: suffix(_smooth(found[0], alpha), m),
        reads="law",
        smoothed=True,
    ),
    # 1 up to and with the first slot whose likeliest draft is not y, then 0, times the decay if there is one (Spec-AUF,
    # arXiv 2607.01893).
    "auf": Weight(
        lambda b: (Argmax(),),
        lambda found, b, m, alpha, decay: _until_failure(found[0] == b.labels, b, m, decay),
        decays=True,
    ),
    # 1 before the first slot whose likeliest draft is not the target's likeliest token, and from there the decay from
    # its start (VAT, arXiv 2608.30135).
    "vat": Weight(
        lambda b: (Argmax(),),
        lambda found, b, m, alpha, decay: _after_failure(found[0] == b.law.labels(), b, m, decay),
        reads="tokens",
        decays=True,
    ),
    # The chance that the target itself writes the labels before the slot (PARD-2, arXiv 2605.08632).
    "target": Weight(
        lambda b: (TeacherLogProb(b.law, b.labels, b.temperature),),
        lambda found, b, m, alpha, decay: _reached(found[0].exp(), m),
        reads="law",
    ),
}
