"""The points of a sweep: every combination of recipes and values, each with a folder of its own."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from dflash_lightning.bench.method import short_name
from dflash_lightning.recipe.faults import Fault, RecipeError

_OPENING, _CLOSING, _QUOTES = "([{", ")]}", "'\""
_ODD = re.compile(r"[^A-Za-z0-9._+-]+")
_ONE = "seed"  # part of a folder's name also where it has a single value


@dataclass(frozen=True)
class Point:
    """One run of a sweep: ``name`` is its folder, ``overrides`` are for ``dflash fit`` of ``recipe``."""

    name: str
    recipe: str
    overrides: tuple[str, ...]

    def command_words(self, folder: str) -> list[str]:
        """What to give ``dflash fit``; ``folder`` is the run's own."""
        quoted = folder.replace("\\", "\\\\").replace('"', '\\"')
        return [self.recipe, *self.overrides, f'run_dir="{quoted}"']


def make_points(recipes: str, words: Sequence[str]) -> list[Point]:
    """The points of ``dflash sweep RECIPES WORDS``, in the order of the recipes, then of the axes as they are written.

    A word with several values (``seed=1,2``) is an axis, any other a setting of all points. Commas inside brackets or
    quotes divide nothing.

    Raises:
        RecipeError: a word without a value, a value or a key that is given twice, or ``run_dir``.
    """
    faults: list[Fault] = []
    names = _values("RECIPE", recipes, faults)
    axes: dict[str, list[str]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:  # ~loss.cross_entropy
            values = [word]
        elif key in axes:
            faults.append(Fault(key, "is given twice", "Write all its values in one word: key=a,b"))
            continue
        else:
            if key == _ONE and text.startswith("["):
                faults.append(
                    Fault(key, f"{text} is a list, and a run has one seed", f"Write {key}={text.strip('[] ')}")
                )
            values = [f"{key}={value}" for value in _values(key, text, faults)]
        axes[key] = values
    if "run_dir" in axes:
        faults.append(Fault("run_dir", "a sweep gives every point a folder of its own", "Use --runs FOLDER"))
    if faults:
        raise RecipeError(faults, "the sweep")
    shown = [key for key, values in axes.items() if len(values) > 1 or key == _ONE]
    points = []
    for recipe, *chosen in product(names, *axes.values()):
        named = [(key, word.partition("=")[2]) for key, word in zip(axes, chosen, strict=True) if key in shown]
        parts = [f"{_plain(key)}-{_plain(value)}" for key, value in named]
        points.append(Point("_".join([_plain(short_name(recipe)), *parts]), recipe, tuple(chosen)))
    return _apart(points)


def split_values(text: str) -> list[str]:
    """``a,b`` divided at its commas, but for those inside brackets or quotes."""
    pieces, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in _QUOTES:
            quote = letter
        elif letter in _OPENING:
            depth += 1
        elif letter in _CLOSING:
            depth -= 1
        if letter == "," and not quote and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    return pieces


def _values(key: str, text: str, faults: list[Fault]) -> list[str]:
    values = [value.strip() for value in split_values(text)]
    if "" in values:
        what = "a value is missing" if any(values) else "names no value"
        faults.append(Fault(f"{key}={text}" if key != "RECIPE" else key, what, f"Write {key}=a,b"))
    if twice := sorted({value for value in values if values.count(value) > 1 and value}):
        faults.append(Fault(key, f"{twice[0]} is given twice", "Name every value once"))
    return values


def _plain(text: str) -> str:
    """``text`` as part of a folder's name."""
    return _ODD.sub("-", text).strip("-") or "x"


def _apart(points: list[Point]) -> list[Point]:
    """Points whose names came out equal get a few letters of what they are behind them."""
    names = [point.name for point in points]
    return [
        point
        if names.count(point.name) == 1
        else Point(f"{point.name}_{_letters(point)}", point.recipe, point.overrides)
        for point in points
    ]


def _letters(point: Point) -> str:
    return hashlib.sha256("\n".join([point.recipe, *point.overrides]).encode()).hexdigest()[:6]
