"""Charts: numbers stand where they belong, and names do not cover each other."""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import combinations

import pytest

from dflash_lightning.pages.charts import Parts, Series, line_chart, parts_chart
from dflash_lightning.pages.charts_compare import Point, scatter_chart
from dflash_lightning.pages.markup import Html, join, tag
from dflash_lightning.pages.numbers import Estimate, figures, fixed, known, short
from dflash_lightning.pages.scale import tick_text, ticks_of


@pytest.mark.parametrize(
    ("values", "zero", "expected"),
    [
        ([1.02, 3.1], False, [1.0, 1.5, 2.0, 2.5, 3.0, 3.5]),
        ([0.3, 0.9], True, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        ([2.0, 2.0], False, [1.4, 1.6, 1.8, 2.0, 2.2, 2.4, 2.6]),
        ([-0.31, 0.3], False, [-0.4, -0.2, 0.0, 0.2, 0.4]),
        ([0.0, 0.0], True, [-0.6, -0.4, -0.2, 0.0, 0.2, 0.4, 0.6]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(values: list[float], zero: bool, expected: list[float]) -> None:
    assert ticks_of(values, zero=zero) == pytest.approx(expected)


def test_numbers_as_they_are_written() -> None:
    assert [figures(v) for v in (0.01234, 1.234, 123.4, 12345.0, 0.0, -2.5)] == [
        *("0.0123", "1.23", "123", "12345", "0", "\N{MINUS SIGN}2.50")
    ]
    assert [short(v) for v in (999.0, 9_437_184, 2.5e9)] == ["999", "9.44 M", "2.50 G"]
    assert [fixed(v, signed=True) for v in (0.3, -0.001)] == ["+0.30", "+0.00"]
    assert [tick_text(v, 0.05) for v in (0.1, 1e-17)] == ["0.10", "0.00"]
    assert [known(v) for v in (True, "2", None, float("nan"), float("inf"), 2)] == [None] * 5 + [2.0]
    assert Estimate.read({"mean": None, "n": 3}) is None and Estimate.read(2) == Estimate(2.0)
    for ends in ({"low": 0.5}, {"low": 1.0, "high": 1.0}):  # an end alone, and one seed alone
        assert Estimate.read({"mean": 1.0, **ends}).interval is None  # type: ignore[union-attr]


def test_lines_go_through_their_points_and_break_at_a_gap() -> None:
    points = [(0.0, 0.0), (1.0, 1.0), (2.0, None), (3.0, 1.0), (4.0, 0.5), (5.0, None), (6.0, 0.25)]
    drawn = line_chart("t", [Series("a", points)], x_label="x", y_label="y")
    lines = re.findall(r'<polyline points="([^"]*)"', drawn)
    assert [len(line.split()) for line in lines] == [2, 2], "a point alone between gaps is a dot"
    dots = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', drawn)]
    assert len(dots) == 5
    (x0, y0), (x1, y1), (x3, y3), (x4, y4), _ = dots
    assert x1 - x0 == pytest.approx(x4 - x3, abs=0.02) and (x3 - x1) / (x1 - x0) == pytest.approx(2.0, abs=0.01)
    assert y1 == y3 < y4 < y0 and (y0 - y4) / (y0 - y1) == pytest.approx(0.5, abs=0.01)


def test_a_run_with_one_evaluation_has_a_chart_too() -> None:
    drawn = line_chart("t", [Series("a", [(0.0, 1.0)])], x_label="x", y_label="y")
    assert drawn.count("<circle") == 1 and "nan" not in drawn.lower()


def test_parts_lie_end_to_end_and_what_was_not_measured_is_said() -> None:
    rows = [Parts("one", [1.0, 3.0, None]), Parts("two", [None, None, None])]
    drawn = parts_chart("t", ["a", "b", "c"], rows, x_label="ms", unit="ms")
    bars = [tuple(map(float, bar)) for bar in re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', drawn)]
    assert len(bars) == 2
    (x, width), (after, longer) = bars
    assert after == pytest.approx(x + width, abs=0.02) and longer == pytest.approx(3 * width, abs=0.03)
    assert "not measured" in drawn


def test_names_in_a_plane_do_not_cover_each_other() -> None:
    points = [Point(f"method_{n}", 200.0 + 3 * (n % 5), 2.0 + 0.01 * n) for n in range(12)]
    drawn = scatter_chart("t", points, x_label="x", y_label="y")
    assert drawn.count("<circle") == 12
    names = re.findall(r'<text x="(-?[\d.]+)" y="([\d.]+)" class="name">([^<]*)<', drawn)
    assert 1 <= len(names) <= 12
    boxes = [(float(x), float(y), float(x) + 5.9 * len(text)) for x, y, text in names]
    for (left, y, right), (other_left, other_y, other_right) in combinations(boxes, 2):
        assert right <= other_left or other_right <= left or abs(y - other_y) >= 12


def test_text_is_escaped_wherever_it_stands_and_markup_only_once() -> None:
    inner = tag("b", "a < b")
    assert tag("p", inner, " & ", ["x", None, 3], title='"<>') == (
        '<p title="&quot;&lt;&gt;"><b>a &lt; b</b> &amp; x3</p>'
    )
    assert (
        isinstance(join("x"), Html) and tag("i", class_="c", stroke_width=1.0) == '<i class="c" stroke-width="1"></i>'
    )


# -- colours ----------------------------------------------------------------------------------------------------------


def _themes() -> list[dict[str, str]]:
    style = files("dflash_lightning.pages").joinpath("style.css").read_text(encoding="utf-8")
    light, dark = style.split("@media (prefers-color-scheme: dark)")[:2]
    found = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", text)) for text in (light, dark)]
    assert len(found[0]) > 15 and found[0].keys() == found[1].keys(), "every colour has a light and a dark value"
    return found


def _contrast(one: str, other: str) -> float:
    """WCAG 2.2's contrast ratio."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", _themes(), ids=["light", "dark"])
def test_text_is_readable_on_every_ground(theme: dict[str, str]) -> None:
    grounds = ["page", "card", "warn", *(f"r{n}" for n in range(6))]
    poor = {(g, round(c, 2)) for g in grounds if (c := _contrast(theme["text"], theme[g])) < 7.0}
    assert poor == set()
    for colour in ("muted", "up", "down", "s2"):
        assert _contrast(theme[colour], theme["card"]) >= 4.4, colour
    for number in range(1, 7):  # lines and bars
        assert _contrast(theme[f"s{number}"], theme["card"]) >= 3.0
    for number in range(6):  # a round is told from the ground and from the next
        assert theme[f"r{number}"] != theme[f"r{(number + 1) % 6}"]
