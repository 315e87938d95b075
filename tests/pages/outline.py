"""Reads a page back: its tags, its text and its tables."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "link", "input"}


class Outline(HTMLParser):
    """Refuses markup that does not close, and collects text, tags and what might be loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [str(value) for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data + " "


def rows_of(page: str, start: str) -> dict[str, list[str]]:
    """Cells of every row of the table whose head begins with ``start``, by the row's name, without markup."""
    table = next(t for t in re.findall(r"<table>.*?</table>", page, re.S) if plain(t).startswith(start))
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in re.findall(r"<tr>.*?</tr>", table, re.S)]
    return {plain(cells[0]): [plain(cell) for cell in cells[1:]] for cells in rows}


def plain(markup: str) -> str:
    """The text of markup, on one line."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", markup)).strip()


def figure_of(page: str, title: str) -> str:
    """The figure with this title, as markup."""
    found = [f for f in re.findall(r"<figure.*?</figure>", page, re.S) if f"<strong>{title}</strong>" in f]
    assert len(found) == 1, (title, len(found))
    return found[0]
