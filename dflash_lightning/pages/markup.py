"""HTML as text that cannot be confused with the texts that it shows."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TypeAlias


class Html(str):
    """Markup; every other text is escaped where it is put into markup."""

    __slots__ = ()


Child: TypeAlias = "str | int | Iterable[Child] | None"


def join(*children: Child) -> Html:
    """The children one after another: markup as it is, other text escaped, null left out."""
    return Html("".join(_pieces(children)))


def _pieces(children: Iterable[Child]) -> Iterable[str]:
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            yield child
        elif isinstance(child, str | int):
            yield html.escape(_visible(str(child)))
        else:
            yield from _pieces(child)


def _visible(text: str) -> str:
    """``text`` without characters that HTML does not allow; line ends and tabs may stay."""
    return "".join(c if c >= " " or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def tag(name: str, *children: Child, **attributes: str | int | float | None) -> Html:
    """An element. Of an attribute's name, ``_`` is read as ``-`` and one at the end is dropped: ``class_``.

    Numbers are written with two decimals at most; an attribute of null is left out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_visible(_value(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>{join(*children)}</{name}>")


def _value(value: str | int | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
