"""Numbers as a page writes them, and the mark of a number that is not there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dflash_lightning.pages.markup import Child, Html, tag

MINUS = "\N{MINUS SIGN}"
_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def gap(reason: str) -> Html:
    """The mark of a value that is missing; ``reason`` shows when it is pointed at, and is read aloud."""
    return tag("span", "n/a", class_="gap", title=reason)


def known(value: Any) -> float | None:
    """``value`` as a number; null where it is none, or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def fixed(value: int | float, digits: int = 2, *, signed: bool = False) -> str:
    """``3.14``, with a true minus sign; ``signed`` writes a plus sign too."""
    rounded = round(value, digits) + 0.0  # which turns -0.0 into 0.0
    text = f"{rounded:+.{digits}f}" if signed else f"{rounded:.{digits}f}"
    return text.replace("-", MINUS)


def figures(value: int | float, count: int = 3) -> str:
    """``value`` with about ``count`` significant figures and no exponent: 0.0123, 1.23, 123, 12345."""
    if value == 0.0:
        return "0"
    digits = max(0, count - 1 - math.floor(math.log10(abs(value))))
    return fixed(value, min(digits, 6))


def short(value: int | float) -> str:
    """``1234567`` as ``1.23 M``."""
    for size, unit in _UNITS:
        if abs(value) >= size:
            return f"{figures(value / size)} {unit}"
    return figures(value)


def percent(value: int | float) -> str:
    """A share of 1 as per cent: 4.5 %."""
    return f"{100 * value:.{0 if value in (0.0, 1.0) else 1}f} %"


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, its standard deviation over them, and two ends, as far as they are known.

    Of tau and of differences the ends are those of a 95 % interval, of all else the smallest and the largest seed.
    """

    mean: float
    spread: float | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None

    @classmethod
    def read(cls, value: Any) -> Estimate | None:
        """What a comparison holds: a mapping, or a number alone; null where there is no mean."""
        if not isinstance(value, dict):
            mean = known(value)
            return None if mean is None else cls(mean)
        mean = known(value.get("mean"))
        if mean is None:
            return None
        n = known(value.get("n"))
        ends = {name: known(value.get(name)) for name in ("spread", "low", "high")}
        return cls(mean, **ends, n=None if n is None else int(n))

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both ends; null unless both are known, and where they are one: a single seed has no smallest and largest."""
        if self.low is None or self.high is None or self.low == self.high:
            return None
        return self.low, self.high

    def words(self, digits: int = 2, *, signed: bool = False) -> str:
        """``2.31 (2.20 to 2.42)``, for a tooltip."""
        text = fixed(self.mean, digits, signed=signed)
        if self.interval is None:
            return text
        low, high = (fixed(end, digits, signed=signed) for end in self.interval)
        return f"{text} ({low} to {high})"

    def cell(self, digits: int = 2, *, signed: bool = False) -> Child:
        """The mean with the spread over seeds, and the interval below it."""
        spread = None if self.spread is None else tag("small", f" ± {fixed(self.spread, digits)}")
        interval: Child = None
        if self.interval is not None:
            low, high = (fixed(end, digits, signed=signed) for end in self.interval)
            interval = tag("small", f"{low} to {high}", class_="interval")
        return [fixed(self.mean, digits, signed=signed), spread, interval]
