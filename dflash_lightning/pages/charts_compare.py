"""Charts of methods side by side: a dot with its interval per method, and methods in a plane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_lightning.pages.charts import drawing, figure, no_figure
from dflash_lightning.pages.markup import Child, Html, tag
from dflash_lightning.pages.numbers import Estimate, figures
from dflash_lightning.pages.scale import HEIGHT, WIDTH, Frame, Scale, frame_for, ticks_of, with_text

_ROW = 22.0
_NAME = 19  # characters of a method's name that fit beside a chart


@dataclass(frozen=True)
class Row:
    """A method and its estimate; null is a gap, which is said in its row. ``marked`` is the one others are held to."""

    name: str
    estimate: Estimate | None
    marked: bool = False


def whisker_chart(
    title: str,
    rows: Sequence[Row],
    *,
    x_label: str,
    reference: float | None = None,
    beside: Sequence[Row] = (),
    signed: bool = False,
) -> Html:
    """A dot per method with its interval, in the given order, and a dashed line at ``reference``.

    Charts that are looked at side by side have one scale: ``beside`` are the rows of the others.
    """
    if not any(row.estimate is not None for row in rows):
        return no_figure(title, "No method has a value.")
    estimates = [row.estimate for row in (*rows, *beside) if row.estimate is not None]
    seen = [end for e in estimates for end in (e.mean, *(e.interval or ()))]
    ticks = ticks_of([*seen, *([] if reference is None else [reference])])
    height, left = _ROW * len(rows) + 52, 136.0
    x = Scale(ticks[0], ticks[-1], left, WIDTH - 16)
    frame = Frame(x, Scale(0.0, 1.0, height - 40.0, 8.0), height=height)
    parts = [tag("line", x1=x(t), x2=x(t), y1=8, y2=height - 40, class_="grid") for t in ticks]
    parts += frame.axes(with_text(ticks), [], x_label=x_label)
    if reference is not None:
        place = x(reference)
        parts.append(tag("line", x1=place, x2=place, y1=8, y2=height - 40, class_="reference"))
    for i, row in enumerate(rows):
        parts += _whisker(row, x, 8 + _ROW * (i + 0.5), left, signed)
    return figure(title, drawing(title, parts, height=height))


def _whisker(row: Row, x: Scale, y: float, left: float, signed: bool) -> list[Html]:
    kind = "s2" if row.marked else "s1"
    name = tag("text", cut_name(row.name), tag("title", row.name), x=left - 8, y=y + 4, class_="tick end")
    if row.estimate is None:
        return [name, tag("text", "no value", x=left + 6, y=y + 4, class_="tick gap")]
    told = tag("title", f"{row.name}: {row.estimate.words(signed=signed)}")
    drawn = [name]
    if row.estimate.interval is not None:
        low, high = map(x, row.estimate.interval)
        drawn.append(tag("line", told, x1=low, x2=high, y1=y, y2=y, class_=f"whisker {kind}"))
    drawn.append(tag("circle", told, cx=x(row.estimate.mean), cy=y, r=4.2, class_=f"dot {kind}"))
    return drawn


def cut_name(name: str) -> str:
    """A name that fits beside a chart."""
    return name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"


@dataclass(frozen=True)
class Point:
    """A method in a plane."""

    name: str
    x: float
    y: float
    marked: bool = False


def scatter_chart(title: str, points: Sequence[Point], *, x_label: str, y_label: str, note: Child = None) -> Html:
    """A dot per method with its name beside it, wherever there is room for it."""
    if not points:
        return no_figure(title, "No method has both values.")
    y_ticks = ticks_of([point.y for point in points])
    x_ticks = ticks_of([point.x for point in points])
    frame = frame_for((x_ticks[0], x_ticks[-1]), y_ticks)
    parts = frame.axes(with_text(x_ticks), with_text(y_ticks), x_label=x_label, y_label=y_label)
    taken = [_box(frame.x(point.x) - 5, frame.y(point.y) - 5, 10.0, 10.0) for point in points]
    for point in points:
        at = frame.x(point.x), frame.y(point.y)
        told = tag("title", f"{point.name}: {figures(point.y)} {y_label}, {figures(point.x)} {x_label}")
        parts.append(tag("circle", told, cx=at[0], cy=at[1], r=4.2, class_=f"dot s{2 if point.marked else 1}"))
        parts += _name_beside(point.name, at, taken, frame)
    return figure(title, drawing(title, parts), note=note)


_Box = tuple[float, float, float, float]  # left, top, right, bottom


def _box(left: float, top: float, width: float, height: float) -> _Box:
    return left, top, left + width, top + height


def _name_beside(name: str, at: tuple[float, float], taken: list[_Box], frame: Frame) -> list[Html]:
    """The name at the first free place around a dot; nothing where all would touch something."""
    text = cut_name(name)
    width = 5.9 * len(text)
    x, y = at
    for left, top in (
        *((x + 7, y - 6), (x - 7 - width, y - 6)),
        *((x - width / 2, y - 19), (x - width / 2, y + 7)),
        *((x + 6, y - 16), (x + 6, y + 5), (x - 6 - width, y - 16), (x - 6 - width, y + 5)),
    ):
        box = _box(left, top, width, 12.0)
        inside = box[0] >= frame.x.start and box[2] <= WIDTH and box[1] >= 14 and box[3] <= HEIGHT - 38
        if inside and not any(_touch(box, other) for other in taken):
            taken.append(box)
            return [tag("text", text, x=left, y=top + 10, class_="name")]
    return []


def _touch(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
