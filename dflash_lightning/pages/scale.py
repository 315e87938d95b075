"""Where numbers stand on a chart: scales, round tick values, and the frame that axes are drawn on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_lightning.pages.markup import Html, tag
from dflash_lightning.pages.numbers import fixed, short

WIDTH, HEIGHT = 420.0, 250.0  # of a chart, in its own units; the page scales it to its column
_CHARACTER = 6.6  # width of a digit of an axis, in these units


@dataclass(frozen=True)
class Scale:
    """A straight line from numbers to places."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The place of ``value``."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def tick_step(low: float, high: float, count: int) -> float:
    """The 1, 2 or 5 times a power of ten that divides a range into at most about ``count`` steps."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough * 0.999)


def ticks_of(values: Sequence[float], count: int = 5, *, zero: bool = False) -> list[float]:
    """Round numbers of equal distance that enclose ``values`` (and 0, where ``zero``)."""
    low, high = min(values), max(values)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = (0.0, high) if zero and high > 0 else (low - 0.5, high + 0.5)
    step = tick_step(low, high, count)
    first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    return [i * step for i in range(first, last + 1)]


def tick_text(value: float, step: float) -> str:
    """A tick's value with as many decimals as its step needs."""
    if max(abs(value), step) >= 1e4:
        return short(value)
    return fixed(value if abs(value) > step * 1e-6 else 0.0, max(0, -math.floor(math.log10(step) + 1e-9)))


@dataclass(frozen=True)
class Frame:
    """The area of a chart, with a scale for either direction."""

    x: Scale
    y: Scale
    width: float = WIDTH
    height: float = HEIGHT

    def axes(
        self,
        x_ticks: Sequence[tuple[float, str]],
        y_ticks: Sequence[tuple[float, str]],
        *,
        x_label: str = "",
        y_label: str = "",
    ) -> list[Html]:
        """Grid lines at the ticks of y, ticks of x below, and what both are."""
        left, right, bottom = self.x.start, self.x.end, self.y.start
        drawn = []
        for value, text in y_ticks:
            place = self.y(value)
            drawn.append(tag("line", x1=left, x2=right, y1=place, y2=place, class_="grid"))
            drawn.append(tag("text", text, x=left - 6, y=place + 4, class_="tick end"))
        for value, text in x_ticks:
            drawn.append(tag("text", text, x=self.x(value), y=bottom + 17, class_="tick middle"))
        drawn.append(tag("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis"))
        if x_label:
            drawn.append(tag("text", x_label, x=(left + right) / 2, y=self.height - 4, class_="label middle"))
        if y_label:
            drawn.append(tag("text", y_label, x=4, y=12, class_="label"))
        return drawn


def frame_for(x_range: tuple[float, float], y_ticks: Sequence[float], *, inset: float = 8.0) -> Frame:
    """A frame with room for the ticks' text; ``inset`` is kept free at both ends of x."""
    step = y_ticks[1] - y_ticks[0]
    left = 14 + _CHARACTER * max(len(tick_text(value, step)) for value in y_ticks)
    low, high = x_range if x_range[1] > x_range[0] else (x_range[0] - 0.5, x_range[0] + 0.5)
    margin = (high - low) * inset / (WIDTH - 10 - left - 2 * inset)
    x = Scale(low - margin, high + margin, left, WIDTH - 10)
    return Frame(x, Scale(y_ticks[0], y_ticks[-1], HEIGHT - 40.0, 24.0))


def with_text(values: Sequence[float]) -> list[tuple[float, str]]:
    """Ticks of equal distance with their text."""
    step = values[1] - values[0] if len(values) > 1 else 1.0
    return [(value, tick_text(value, step)) for value in values]
