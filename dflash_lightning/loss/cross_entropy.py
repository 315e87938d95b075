"""Cross-entropy with one token per slot: the data's own, or the target's likeliest."""

from __future__ import annotations

from typing import ClassVar, Literal

from dflash_lightning.loss.weighted import WeightedLoss


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
