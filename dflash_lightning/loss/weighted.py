"""Losses of a number per slot, weighted: the whole family, and its usual members under their own names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_lightning.errors import SettingError
from dflash_lightning.loss.base import Normalize, SlotwiseLoss, check_normalize, check_temperature
from dflash_lightning.loss.weights import WEIGHTS, Block
from dflash_lightning.ops.lm_head import (
    JSD,
    KL,
    HeadOutput,
    LabelLogProb,
    Overlap,
    Renyi,
    Request,
    SoftLabelLogProb,
    Teacher,
)
from dflash_lightning.types import BlockLayout, FeatureSpec

Loss = Literal["ce", "soft_ce", "forward_kl", "reverse_kl", "jsd", "tv", "nla", "renyi", "lk_hybrid"]
DivergenceKind = Literal["forward_kl", "reverse_kl", "jsd"]
WeightKind = Literal["decay", "label", "label_reach", "label_continuation", "overlap", "auf", "vat", "target"]
_LEAST = 1e-5  # of an overlap: below it there is nothing to gain from a slot, and its gradient would be noise


@dataclass(frozen=True)
class _Number:
    """What is asked about a slot, and its loss [B N K] made of the answers: ``make(answers, temperature, eta)``."""

    ask: Callable[[Block], Sequence[Request]]
    make: Callable[..., Float[Tensor, "B N K"]]
    reads_law: bool = True


def _hybrid(found: Sequence[Tensor], temperature: float, eta: float) -> Float[Tensor, "B N K"]:
    divergence, overlap = found
    share = torch.exp(-eta * overlap.detach())
    return share * divergence * temperature**2 + (1.0 - share) * (1.0 - overlap)


_NUMBERS: dict[str, _Number] = {
    "ce": _Number(lambda b: (LabelLogProb(b.labels, b.temperature),), lambda found, t, eta: -found[0], False),
    "soft_ce": _Number(lambda b: (SoftLabelLogProb(b.law, b.temperature),), lambda found, t, eta: -found[0] * t**2),
    "forward_kl": _Number(lambda b: (KL(b.law, False, b.temperature),), lambda found, t, eta: found[0] * t**2),
    "reverse_kl": _Number(lambda b: (KL(b.law, True, b.temperature),), lambda found, t, eta: found[0] * t**2),
    "jsd": _Number(lambda b: (JSD(b.law, b.temperature),), lambda found, t, eta: found[0] * t**2),
    "tv": _Number(lambda b: (Overlap(b.law, temperature=b.temperature),), lambda found, t, eta: 1.0 - found[0]),
    "nla": _Number(
        lambda b: (Overlap(b.law, temperature=b.temperature),), lambda found, t, eta: -found[0].clamp(min=_LEAST).log()
    ),
    "renyi": _Number(lambda b: (Renyi(b.law, b.temperature),), lambda found, t, eta: found[0] * t**2),
    "lk_hybrid": _Number(
        lambda b: (KL(b.law, False, b.temperature), Overlap(b.law, temperature=b.temperature)), _hybrid
    ),
}


class WeightedLoss(SlotwiseLoss):
    """``sum(W_k * loss_k) / divisor`` over valid slots, with weights ``W`` that carry no gradient.

    q is the draft's law of a slot, p the target's, both at ``temperature``; ``a = sum_v min(p(v), q(v))`` is the chance
    that a draft of the slot is accepted, y its label. ``loss`` is

    - ``ce``: ``-log q(y)``; ``soft_ce``: ``-sum p log q``;
    - ``forward_kl``, ``reverse_kl``, ``jsd``: see ``Divergence``; ``renyi``: ``-2 log sum sqrt(p q)``;
    - ``tv``: ``1 - a``; ``nla``: ``-log a``, whose gradient is that of ``tv`` divided by ``a`` (LK-alpha, arXiv
      2602.23881). Overlaps below 1e-5 count as 1e-5 there, as in published code;
    - ``lk_hybrid``: ``s KL(p, q) + (1 - s) (1 - a)`` with ``s = exp(-eta a)``, slot by slot (same paper; other code
      takes one ``s`` per batch).

    Whole laws times ``temperature^2``, see ``Divergence``. ``weight`` is

    - ``decay``: ``exp(-j / decay)`` by place;
    - ``label``: the derivative of the expected length ``sum_j prod_{i <= j} s_i`` with respect to ``log s_k``, where
      ``s = (1 - alpha) q(y) + alpha``. D-PACE (arXiv 2605.18810) has ``ce`` and alpha .5. With alpha 0 the gradient of
      the sum is that of ``-sum_j prod_{i <= j} q_i(y_i)`` exactly (EAL, arXiv 2609.24150); above 0 it is that of
      nothing. It is ``P_k`` times what a right slot opens, ``W_k / P_k`` with ``P_k`` the product of ``s`` up to
      ``k``: ``label_reach`` and ``label_continuation`` are these alone (D-PACE's ablations);
    - ``overlap``: the same with ``a`` in place of ``q(y)``: with ``renyi`` D-PARD, with ``nla`` DPALA (SpecForge's
      documents), with ``nla`` and alpha 0 window total variation (WTV, arXiv 2609.24150, AngelSpec's end-to-end TV),
      whose gradient is that of ``-sum_j prod_{i <= j} a_i``;
    - ``auf``: 1 up to and with the first slot whose likeliest draft is not y, then 0, times the decay if there is one
      (Spec-AUF, arXiv 2607.01893);
    - ``vat``: 1 before the first slot whose likeliest draft is not the target's likeliest token, and from there the
      decay from its start (VAT, arXiv 2608.30135);
    - ``target``: the chance that the target itself writes the labels before the slot (PARD-2, arXiv 2605.08632).

    A slot that is not valid is never a failure and stops no product. Where alpha is 0 or the weight ``target``, weights
    of a new drafter are almost 0: begin with a trained one. Weights that follow the drafter are no divisor, because
    divisors are counted before the forward pass; published code of PARD-2, and of D-PACE in AngelSpec, has them as one.
    Spec-AUF and VAT do not state theirs (``slots`` is ours), and EAL and WTV are RECONSTRUCTED from their abstract.
    """

    name: ClassVar[str] = "weighted"

    def __init__(
        self,
        *,
        loss: Loss = "ce",  # what a slot loses
        weight: WeightKind = "decay",  # what it weighs
        alpha: float | int | None = None,  # smooths the chances of weights label and overlap: 0 not, 1 wholly
        decay: float | int | None = None,  # slots over which weights decay, auf and vat fall to 1/e; null: they do not
        labels: Literal["data", "target"] = "data",  # y: the row's own token, or the target's likeliest
        temperature: float | int = 1.0,  # divides the logits of both laws
        eta: float | int = 3.0,  # how fast lk_hybrid goes from KL to total variation as the overlap grows
        normalize: Normalize = "slots",  # divisor: slots, blocks, documents, document_mean; weights with decay only
        prefix: bool = False,  # count only the unbroken run of valid slots at the start of a block
        coefficient: float | int = 1.0,  # weight of the term in the sum
        view: str = "main",  # which of the head's distributions is scored
    ) -> None:
        super().__init__(decay=decay, coefficient=coefficient, view=view, prefix=prefix)
        for setting, given, known in (("loss", loss, Loss), ("weight", weight, WeightKind)):
            if given not in get_args(known):
                raise SettingError(f"loss.{setting}", f"{given!r} is unknown", f"Use one of {list(get_args(known))}")
        if labels not in ("data", "target"):
            raise SettingError("loss.labels", f"{labels!r} is unknown", "Use 'data' or 'target'")
        if eta < 0:
            raise SettingError("loss.eta", f"{eta} would favour KL where drafts are accepted", "Use 0 or more (3)")
        check_normalize(normalize)
        self.loss: Loss = loss
        self.weight: WeightKind = weight
        self.labels = labels
        self.temperature = check_temperature(temperature)
        self.eta = float(eta)
        self.normalize = normalize
        self.alpha = self._alpha(alpha)

    def _alpha(self, alpha: float | int | None) -> float | None:
        """The smoothing, after a look at what goes with the weight.

        Raises:
            ValueError: a setting that the weight has no use for, none where it needs one, or one out of its range.
        """
        weight, name = WEIGHTS[self.weight], self.weight
        if self.decay is not None and not weight.decays:
            raise SettingError(
                "loss.decay", f"weight {name!r} says itself what a place is worth", "Use null, or weight=decay"
            )
        if self.normalize == "weights" and name != "decay":
            raise SettingError(
                "loss.normalize", f"the sum of weight {name!r} is not known before the forward pass", "Use slots"
            )
        if weight.smoothed and (alpha is None or not 0 <= alpha <= 1):
            raise SettingError("loss.alpha", f"{alpha} is not a share", "Use 0..1 (D-PACE: 0.5)")
        if alpha is not None and not weight.smoothed:
            raise SettingError("loss.alpha", f"weight {name!r} smooths nothing", "Use null, or weight=label or overlap")
        return None if alpha is None else float(alpha)

    def required(self) -> FeatureSpec:
        reads = _NUMBERS[self.loss].reads_law or WEIGHTS[self.weight].reads != "nothing"
        return FeatureSpec(last_hidden=reads or self.labels == "target")

    def laws(self) -> tuple[float, ...]:
        reads = _NUMBERS[self.loss].reads_law or WEIGHTS[self.weight].reads == "law"
        return (self.temperature,) if reads else ()

    def per_slot(self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None) -> Float[Tensor, "B N K"]:
        block, number = self._block(layout, teacher), _NUMBERS[self.loss]
        asked = number.ask(block)
        # The weight's questions go along, so that one pass over the logits answers all.
        found = self.view_of(out).ask(*asked, *WEIGHTS[self.weight].ask(block))
        return number.make(found[: len(asked)], self.temperature, self.eta)

    def weights(self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None) -> Float[Tensor, "B N K"]:
        block, weight = self._block(layout, teacher), WEIGHTS[self.weight]
        found = self.view_of(out).ask(*weight.ask(block))
        return weight.weigh(found, block, self.counted(layout), self.alpha, self.decay)

    def figures(self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None) -> dict[str, Float[Tensor, ""]]:
        """The sum of the weights where they follow the drafter: how much is trained (of ``auf``: how many slots)."""
        if self.weight == "decay":
            return {}
        return {"weight": torch.where(self.counted(layout), self.weights(out, layout, teacher), 0.0).sum()}

    def _block(self, layout: BlockLayout, teacher: Teacher | None) -> Block:
        return Block(layout, teacher, self.labels == "target", self.temperature)


class CrossEntropy(WeightedLoss):
    """``sum(w_j * -log q(label)) / sum(w_j)`` over valid slots (DFlash, arXiv 2602.06036 sec. 4.2).

    ``labels: target`` teaches the token that the target itself finds likeliest after the row's tokens, which is what
    greedy decoding accepts (a term of AdaFlash, arXiv 2607.19223). The row's own tokens then serve as context only.
    Slots are counted by the row's labels in both cases: where a reduced draft vocabulary lacks the target's token, the
    slot is counted and teaches nothing.
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
        super().__init__(
            decay=decay, labels=labels, normalize="weights", prefix=prefix, coefficient=coefficient, view=view
        )


class Divergence(WeightedLoss):
    """``T^2`` times a divergence of the draft's law q and the target's law p, both at temperature T (in nats).

    ``forward_kl`` is ``sum p log(p / q)``: q must cover whatever p does. ``reverse_kl`` is ``sum q log(q / p)``: q may
    settle on one of p's modes. ``jsd`` is the mean divergence of both from their mean, at most log 2. The factor keeps
    gradients of one size whatever T is (Hinton et al., arXiv 1503.02531). With a reduced draft vocabulary p is taken
    given that the token is one of the draft's.
    """

    name: ClassVar[str] = "divergence"

    def __init__(
        self,
        *,
        kind: DivergenceKind = "forward_kl",  # which divergence
        temperature: float | int = 1.0,  # divides the logits of both laws
        decay: float | int | None = None,  # slots over which the weight falls to 1/e; null weighs all alike
        prefix: bool = False,  # count only the unbroken run of valid slots at the start of a block
        coefficient: float | int = 1.0,  # weight of the term in the sum
        view: str = "main",  # which of the head's distributions is scored
    ) -> None:
        if kind not in get_args(DivergenceKind):
            raise SettingError("loss.kind", f"{kind!r} is unknown", f"Use one of {list(get_args(DivergenceKind))}")
        super().__init__(
            loss=kind,
            temperature=temperature,
            decay=decay,
            normalize="weights",
            prefix=prefix,
            coefficient=coefficient,
            view=view,
        )
        self.kind: DivergenceKind = kind
        self.labels = "target"


class TotalVariation(WeightedLoss):
    """``1 - sum_v min(p(v), q(v))``: the chance that a draft of the slot is rejected, between 0 and 1.

    This is half the L1 distance; heads that state the whole L1 distance weigh it twice as much. Its gradient vanishes
    where p and q share no mass, so it serves beside another term or after one. With a reduced draft vocabulary p stays
    the whole law, of which the draft cannot reach all.
    """

    name: ClassVar[str] = "total_variation"

    def __init__(
        self,
        *,
        temperature: float | int = 1.0,  # divides the logits of both laws: the temperature that decoding will use
        decay: float | int | None = None,  # slots over which the weight falls to 1/e; null weighs all alike
        prefix: bool = False,  # count only the unbroken run of valid slots at the start of a block
        coefficient: float | int = 1.0,  # weight of the term in the sum
        view: str = "main",  # which of the head's distributions is scored
    ) -> None:
        super().__init__(
            loss="tv",
            temperature=temperature,
            decay=decay,
            normalize="weights",
            prefix=prefix,
            coefficient=coefficient,
            view=view,
        )
        self.labels = "target"
