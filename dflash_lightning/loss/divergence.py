"""Divergences between the laws of draft and target, weighted by place as in DFlash."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from dflash_lightning.errors import SettingError
from dflash_lightning.loss.weighted import WeightedLoss

DivergenceKind = Literal["forward_kl", "reverse_kl", "jsd"]


class Divergence(WeightedLoss):
    """``sum(w_j * T^2 D_j) / sum(w_j)``, ``D_j`` a divergence of the draft's law q_j and the target's p_j (in nats).

    ``w_j = exp(-j / decay)``. ``kind`` is ``forward_kl``, ``reverse_kl`` or ``jsd``: ``loss/slot_losses.py`` has the
    formulas. With a reduced draft vocabulary p is taken given that the token is one of the draft's.
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
            labels="target",
            temperature=temperature,
            decay=decay,
            normalize="weights",
            prefix=prefix,
            coefficient=coefficient,
            view=view,
        )
        self.kind: DivergenceKind = kind


class TotalVariation(WeightedLoss):
    """``sum(w_j * (1 - a_j)) / sum(w_j)``; ``1 - a_j``, the chance that draft j is rejected, is ``tv`` between 0 and 1.

    ``a_j = sum_v min(p_j(v), q_j(v))`` and ``w_j = exp(-j / decay)``.
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
            labels="target",
            temperature=temperature,
            decay=decay,
            normalize="weights",
            prefix=prefix,
            coefficient=coefficient,
            view=view,
        )
