"""Charts as figures of a page: lines, bars, and bars in parts. Colours come from the page's style."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_lightning.pages.markup import Child, Html, tag
from dflash_lightning.pages.numbers import figures, fixed
from dflash_lightning.pages.scale import HEIGHT, WIDTH, Frame, Scale, frame_for, tick_text, ticks_of, with_text

NUM_COLOURS = 6
BAR_ROW = 30.0


@dataclass(frozen=True)
class Series:
    """A line: its name in the legend and its points, of which a null y breaks it. ``colour`` counts from 1."""

    name: str
    points: Sequence[tuple[float, float | None]]
    colour: int = 1
    dashed: bool = False


def figure(title: str, drawing: Child, *, note: Child = None, legend: Sequence[tuple[str, str]] = ()) -> Html:
    """A chart with its title, a legend of (name, class of its colour), and what must be known to read it."""
    keys = [tag("span", tag("i", class_=f"key {kind}"), name) for name, kind in legend]
    return tag(
        "figure",
        tag("figcaption", tag("strong", title), tag("span", keys, class_="legend") if keys else None),
        drawing,
        None if note is None else tag("p", note, class_="note"),
    )


def no_figure(title: str, reason: Child) -> Html:
    """The place of a chart that cannot be drawn, with the reason."""
    return tag("figure", tag("figcaption", tag("strong", title)), tag("p", reason, class_="gap"), class_="empty")


def drawing(title: str, parts: Child, *, width: float = WIDTH, height: float = HEIGHT) -> Html:
    """An SVG that fills its column."""
    return tag("svg", tag("title", title), parts, viewBox=f"0 0 {width:g} {height:g}", role="img")


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    x_ticks: Sequence[float] | None = None,
    zero: bool = False,
    top: float | None = None,
    note: Child = None,
) -> Html:
    """Lines with a dot at every point. ``zero`` keeps 0 in view, ``top`` a highest value; ``x_ticks`` null: round ones.

    Without any point the reason stands in the figure's place.
    """
    points = [(x, y) for line in series for x, y in line.points if y is not None]
    if not points:
        return no_figure(title, "No value was measured.")
    y_values = ticks_of([*(y for _, y in points), *([] if top is None else [top])], zero=zero)
    xs = [x for x, _ in points]
    frame = frame_for((min(xs), max(xs)), y_values)
    if x_ticks is None:
        inside = [x for x in ticks_of(xs) if min(xs) <= x <= max(xs)]
        places = with_text(inside) if len(inside) > 1 else [(x, figures(x)) for x in sorted(set(xs))[:2]]
    else:
        places = [(x, f"{x:g}") for x in x_ticks]
    parts = [*frame.axes(places, with_text(y_values), x_label=x_label, y_label=y_label)]
    for line in series:
        parts += _line(frame, line, x_label, y_label)
    legend = [(line.name, f"s{line.colour}") for line in series] if len(series) > 1 else []
    return figure(title, drawing(title, parts), note=note, legend=legend)


def _line(frame: Frame, line: Series, x_label: str, y_label: str) -> list[Html]:
    drawn, piece = [], []
    for x, y in [*line.points, (0.0, None)]:
        if y is not None:
            piece.append(f"{frame.x(x):.1f},{frame.y(y):.1f}")
            continue
        if len(piece) > 1:
            dashes = " dashed" if line.dashed else ""
            drawn.append(tag("polyline", points=" ".join(piece), class_=f"line s{line.colour}{dashes}"))
        piece = []
    for x, y in line.points:
        if y is not None:
            told = f"{line.name}: {figures(y)} {y_label} at {x_label} {figures(x, 6)}"
            place = {"cx": frame.x(x), "cy": frame.y(y)}
            drawn.append(tag("circle", tag("title", told), **place, r=3.2, class_=f"dot s{line.colour}"))
    return drawn


@dataclass(frozen=True)
class Bar:
    """A bar: what stands below it, how high it is, what is written above, and whether it is set apart."""

    label: str
    value: float
    text: str = ""
    marked: bool = False


def bar_chart(title: str, bars: Sequence[Bar], *, x_label: str, y_label: str, note: Child = None) -> Html:
    """Upright bars; texts above them are left out where they would touch."""
    y_values = ticks_of([bar.value for bar in bars], zero=True)
    frame = frame_for((0.0, len(bars) - 1.0), y_values, inset=0.0)
    pitch = (frame.x.end - frame.x.start) / len(bars)
    frame = Frame(Scale(-0.5, len(bars) - 0.5, frame.x.start, frame.x.end), frame.y)
    every = max(1, round(22 / pitch + 0.4))
    places = [(float(i), bar.label) for i, bar in enumerate(bars) if i % every == 0 or i == len(bars) - 1]
    parts = frame.axes(places, with_text(y_values), x_label=x_label, y_label=y_label)
    for i, bar in enumerate(bars):
        top, middle = frame.y(bar.value), frame.x(float(i))
        size = {"x": middle - 0.39 * pitch, "y": top, "width": 0.78 * pitch, "height": frame.y.start - top}
        told = tag("title", f"{x_label} {bar.label}: {figures(bar.value)} {y_label}")
        parts.append(tag("rect", told, **size, rx=2.0, class_=f"bar s{2 if bar.marked else 1}"))
        if bar.text and pitch >= 30:
            parts.append(tag("text", bar.text, x=middle, y=top - 4, class_="value middle"))
    return figure(title, drawing(title, parts), note=note)


@dataclass(frozen=True)
class Parts:
    """A bar that lies and is made of parts, one per name of the chart; null where a part was not measured."""

    label: str
    values: Sequence[float | None]


def parts_chart(
    title: str, names: Sequence[str], rows: Sequence[Parts], *, x_label: str, unit: str, note: Child = None
) -> Html:
    """Lying bars in parts of one colour per name, with the sum at their end."""
    sums = [sum(value or 0.0 for value in row.values) for row in rows]
    ticks = ticks_of(sums, zero=True)
    left, height = 112.0, 30 + BAR_ROW * len(rows) + 36
    x = Scale(0.0, ticks[-1], left, WIDTH - 62)
    frame = Frame(x, Scale(0.0, 1.0, height - 40.0, 8.0), height=height)
    parts = [tag("line", x1=x(t), x2=x(t), y1=8, y2=height - 40, class_="grid") for t in ticks]
    parts += frame.axes(with_text(ticks), [], x_label=x_label)
    for i, (row, total) in enumerate(zip(rows, sums, strict=True)):
        y, at = 12 + BAR_ROW * i, 0.0
        parts.append(tag("text", row.label, x=left - 6, y=y + 16, class_="tick end"))
        for colour, (name, value) in enumerate(zip(names, row.values, strict=True), start=1):
            if value is not None and value > 0:
                told = tag("title", f"{row.label}, {name}: {figures(value)} {unit}")
                size = {"x": x(at), "y": y, "width": max(0.0, x(at + value) - x(at)), "height": 22.0}
                parts.append(tag("rect", told, **size, class_=f"bar s{colour}"))
                at += value
        text = f"{tick_text(total, tick_step_of(ticks) / 10)} {unit}" if total else "not measured"
        parts.append(tag("text", text, x=x(at) + 5, y=y + 16, class_="value"))
    legend = [(name, f"s{colour}") for colour, name in enumerate(names, start=1)] if len(names) > 1 else []
    return figure(title, drawing(title, parts, height=height), note=note, legend=legend)


def tick_step_of(ticks: Sequence[float]) -> float:
    """The distance of ticks."""
    return ticks[1] - ticks[0]


def share_text(value: float) -> str:
    """A share of 1 above a bar: whole per cent, or one decimal below ten."""
    return f"{fixed(100 * value, 0 if value >= 0.095 else 1)} %"
