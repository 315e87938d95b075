"""How far the draft's law is from the target's own, slot by slot, over the whole vocabulary."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from dflash_lightning.errors import SettingError
from dflash_lightning.loss.weighted import WeightedLoss

Kind = Literal["forward_kl", "reverse_kl", "jsd"]


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
        kind: Kind = "forward_kl",  # which divergence
        temperature: float | int = 1.0,  # divides the logits of both laws
        decay: float | int | None = None,  # slots over which the weight falls to 1/e; null weighs all alike
        prefix: bool = False,  # count only the unbroken run of valid slots at the start of a block
        coefficient: float | int = 1.0,  # weight of the term in the sum
        view: str = "main",  # which of the head's distributions is scored
    ) -> None:
        if kind not in get_args(Kind):
            raise SettingError("loss.kind", f"{kind!r} is unknown", f"Use one of {list(get_args(Kind))}")
        super().__init__(
            loss=kind,
            temperature=temperature,
            decay=decay,
            normalize="weights",
            prefix=prefix,
            coefficient=coefficient,
            view=view,
        )
        self.kind: Kind = kind
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
