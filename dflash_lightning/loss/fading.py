"""Cross entropies of which one fades into the other while the drafter learns (Domino, arXiv 2605.29707)."""

from __future__ import annotations

from typing import ClassVar, Literal

from dflash_lightning.errors import SettingError
from dflash_lightning.loss.cross_entropy import CrossEntropy
from dflash_lightning.schedule import fade
from dflash_lightning.types import StepContext

Fades = Literal["out", "in"]


class FadingCrossEntropy(CrossEntropy):
    """``CrossEntropy`` whose coefficient falls over the training (``fades: out``), or is what the other one leaves.

    ``lambda = start (1 - step / (until * total))``, cut to 0..1. A term that fades ``out`` weighs ``coefficient *
    lambda``, one that fades ``in`` ``coefficient * (1 - lambda)``. Domino's loss is one of each: ``out`` on the view
    ``base``, ``in`` on ``main``. While lambda is 1 the second one's gradient is exactly 0.
    """

    name: ClassVar[str] = "fading_cross_entropy"

    def __init__(
        self,
        *,
        fades: Fades = "out",  # out: lambda; in: 1 - lambda
        start: float | int = 1.0,  # lambda at the first step
        until: float | int = 1.0,  # share of the training after which lambda is 0
        decay: float | int | None = None,  # slots over which the weight falls to 1/e; null weighs all alike
        labels: Literal["data", "target"] = "data",  # the row's own token, or the one that the target finds likeliest
        prefix: bool = False,  # count only the unbroken run of valid slots at the start of a block
        coefficient: float | int = 1.0,  # weight of the term in the sum, which lambda multiplies
        view: str = "main",  # which of the head's distributions is scored
    ) -> None:
        super().__init__(decay=decay, labels=labels, prefix=prefix, coefficient=coefficient, view=view)
        if fades not in ("out", "in"):
            raise SettingError("loss.fades", f"{fades!r} is unknown", "Use 'out' or 'in'")
        if not 0 <= start <= 1:
            raise SettingError("loss.start", f"{start} is not a share", "Use 0..1 (Domino: 1)")
        if not 0 < until <= 1:
            raise SettingError("loss.until", f"{until} is no share of the training", "Use above 0, at most 1")
        self.fades: Fades = fades
        self.start = float(start)
        self.until = float(until)

    def coef(self, ctx: StepContext) -> float:
        share = fade(ctx.step, ctx.total_steps, start=self.start, until=self.until)
        return self.coefficient * (share if self.fades == "out" else 1.0 - share)
