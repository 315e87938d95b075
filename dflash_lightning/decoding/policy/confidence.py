"""Cutting drafts where the head itself does not believe in them."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from dflash_lightning.decoding.paths import leading
from dflash_lightning.decoding.policy.base import WidthPolicy
from dflash_lightning.decoding.types import Draft, Round
from dflash_lightning.errors import SettingError


class ConfidencePolicy(WidthPolicy):
    """Judges drafts up to the first whose confidence is below ``threshold`` (DSpark, arXiv 2607.05147).

    The signal ``confidence`` ``[B, D]`` is the head's probability that draft ``d`` is accepted, given that those before
    it are. ``cumulative`` compares the running product instead: the probability that all drafts up to here stand.
    A confidence may know the drafts *before* its own, never its own or a later one. Then also the width is lossless
    under rejection: whether a draft is judged is decided before it is drawn, because the first low confidence ends the
    draft. A rule that looked for the *last* high one would not be. ``threshold`` 0 cuts nothing.

    Raises:
        ValueError: ``threshold`` is not in [0, 1], or the head gives no confidence.
    """

    name = "confidence"
    sees = "laws"
    reads = ("confidence",)

    def __init__(self, *, threshold: float = 0.5, cumulative: bool = False) -> None:
        if not 0.0 <= threshold <= 1.0:
            raise SettingError(
                "decoding.policy.threshold", f"{threshold} is no probability", "Use a number in [0, 1]; 0 cuts nothing"
            )
        self.threshold = threshold
        self.cumulative = cumulative

    def width(self, draft: Draft, where: Round) -> Int[Tensor, " B"]:
        if "confidence" not in draft.signals:
            raise SettingError(
                "decoding.policy",
                f"ConfidencePolicy reads the signal 'confidence', but the draft has {sorted(draft.signals)}",
                "Use a drafter whose head gives it, or set decoding.policy to null",
            )
        confidence = draft.signals["confidence"].float()
        return leading((confidence.cumprod(1) if self.cumulative else confidence) >= self.threshold)
