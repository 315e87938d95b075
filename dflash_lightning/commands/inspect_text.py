"""A document as text: every token's id, text and mask one under the other, in lines that fit the terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator

from dflash_lightning.data.read.store import MaskedIds

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"
_SPACE = "\u00b7"  # shown for a space, which would not be seen at the edge of a token
_GAP = "  "
_LABEL = 8


class TokenTable:
    """Lays out documents.

    ::

              25  | 198  19556  28  2
            text  | \\n   Hello  ,   <|im_end|>
        learned   |      ^^^^^  ^   ^^^^^^^^^^

    ``decode`` gives the text of ids (null: there is none to show). ``coloured`` shows supervised text in green too.
    """

    def __init__(self, decode: Callable[[list[int]], str] | None, *, width: int, coloured: bool) -> None:
        self._decode = decode
        self._width = width
        self._coloured = coloured
        self._texts: dict[int, str] = {}

    def lines(self, document: MaskedIds) -> Iterator[str]:
        """The lines of one document, three for every group of tokens that fits."""
        cells = [(str(token), self._text(token)) for token in document.ids.tolist()]
        widths = [max(len(number), _columns(text)) for number, text in cells]
        mask, start = document.mask.tolist(), 0
        while start < len(cells):
            end, used = start, _LABEL + 3
            while end < len(cells) and (end == start or used + len(_GAP) + widths[end] <= self._width):
                used += len(_GAP) + widths[end]
                end += 1
            part = range(start, end)
            yield _line(str(start), [cells[j][0].ljust(widths[j]) for j in part])
            if self._decode is not None:
                yield _line("text", [self._paint(_pad(cells[j][1], widths[j]), mask[j]) for j in part])
            yield _line("learned", [("^" if mask[j] else " ") * widths[j] for j in part])
            start = end

    def _text(self, token: int) -> str:
        if self._decode is None:
            return ""
        if token not in self._texts:
            self._texts[token] = visible(self._decode([token]))
        return self._texts[token]

    def _paint(self, text: str, supervised: bool) -> str:
        return f"{_GREEN}{text}{_PLAIN}" if supervised and self._coloured else text


def visible(text: str) -> str:
    """Text on one line, with everything that would not show, or would act on the terminal, written out."""
    shown = []
    for char in text:
        if char == " ":
            shown.append(_SPACE)
        elif char == "\n":
            shown.append("\\n")
        elif char == "\t":
            shown.append("\\t")
        elif unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp"):
            shown.append(f"\\u{ord(char):04x}")
        else:
            shown.append(char)
    return "".join(shown)


def _line(label: str, cells: list[str]) -> str:
    return f"{label:>{_LABEL}} | {_GAP.join(cells)}".rstrip()


def _columns(text: str) -> int:
    """Columns that a terminal gives the text: wide characters two, marks on the one before none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _pad(text: str, width: int) -> str:
    return text + " " * (width - _columns(text))
