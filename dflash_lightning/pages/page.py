"""The frame of every page: head, style, title, sections, tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.resources import files

from dflash_lightning.pages.markup import Child, Html, join, tag


def page(title: str, lead: Child, sections: Iterable[Child]) -> str:
    """A whole HTML document that loads nothing."""
    style = files("dflash_lightning.pages").joinpath("style.css").read_text(encoding="utf-8")
    assert "</" not in style and "url(" not in style and "@import" not in style, "the style must stand alone"
    head = join(
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'),
        tag("title", title),
        Html(f"<style>{style}</style>"),
    )
    body = tag("main", tag("header", tag("h1", title), lead), *sections)
    return f'<!doctype html>\n<html lang="en">{tag("head", head)}{tag("body", body)}</html>\n'


def section(title: str, *children: Child) -> Html:
    """A part of a page under its own heading."""
    return tag("section", tag("h2", title), *children)


def paragraph(*children: Child) -> Html:
    """Text."""
    return tag("p", *children)


def charts(*figures: Child) -> Html:
    """Charts in as many columns as there is room for."""
    return tag("div", *figures, class_="charts")


def warning(*children: Child) -> Html:
    """What makes figures doubtful, or is missing."""
    return tag("div", *children, class_="warning")


def listing(items: Iterable[Child]) -> Html:
    """Items, one below the other."""
    return tag("ul", [tag("li", item) for item in items])


def table(columns: Sequence[Child], rows: Iterable[Sequence[Child]], *, groups: Child = None) -> Html:
    """A table whose first column names the rows and stays in view; on a narrow screen it scrolls on its own.

    ``groups`` is a row of headings above the columns.
    """
    head = tag("tr", [tag("th", column, scope="col") for column in columns])
    body = [tag("tr", tag("th", first, scope="row"), [tag("td", cell) for cell in rest]) for first, *rest in rows]
    return tag(
        "div",
        tag("table", tag("thead", groups, head), tag("tbody", body)),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label="table",
    )


def facts(rows: Iterable[tuple[Child, Child]], *, title: str) -> Html:
    """Names and values, folded in until they are asked for."""
    body = [tag("tr", tag("th", name, scope="row"), tag("td", value)) for name, value in rows]
    return tag("details", tag("summary", title), tag("div", tag("table", tag("tbody", body), class_="facts")))


def tile(value: Child, name: str, about: Child = None) -> Html:
    """A figure that is read first, with its name and what it was measured on."""
    return tag("div", tag("b", value), tag("span", name), None if about is None else tag("small", about), class_="tile")
