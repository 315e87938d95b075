"""Ids that a server made of the same rows, compared with those of training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash_lightning.data.inspection import supervised_spans
from dflash_lightning.data.read.records import BadRecord
from dflash_lightning.data.read.sources import Source
from dflash_lightning.data.read.store import MaskedIds

WHOLE, PROMPT = "input_ids", "prompt_token_ids"
_AROUND = 8  # tokens shown on either side of a difference

_Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class _Served:
    where: str
    ids: list[int]
    is_prompt: bool


class ServerIds:
    """Records of a file by the place they belong to, compared one document at a time.

    A record has ``input_ids`` (all of a document) or ``prompt_token_ids`` (what the server was given to continue: it
    must open the document and end where a supervised span begins). It belongs to the line ``line`` of the data and to
    that line's document ``row`` (counted from 0); without ``line``, to the line of its own number.
    """

    def __init__(self, path: str, data: str) -> None:
        """Raises ``ValueError`` where a record has no ids, or two belong to one place."""
        self.path, self.data = path, data
        self._served: dict[tuple[int, int], _Served] = {}
        self.equal = self.differing = self.of_dropped = 0
        for record in Source(path).records("--against"):
            if isinstance(record, BadRecord):
                raise ValueError(f"--against: {record.where}: {record.reason}")
            place, served = _parse(record.value, record.where, record.line)
            if place in self._served:
                raise ValueError(
                    f"--against: {record.where} is a second record for line {place[0]}, row {place[1]} of the data "
                    f"(the first: {self._served[place].where}). Give 'line' and 'row' in every record."
                )
            self._served[place] = served

    def compare(self, line: int, row: int, document: MaskedIds, decode: _Decode) -> str | None:
        """The first difference in words; null where there is none, or no record for this document."""
        served = self._served.pop((line, row), None)
        if served is None:
            return None
        ids = document.ids.tolist()
        position = _first_difference(ids, served.ids, served.is_prompt)
        if position is None and served.is_prompt:
            starts = [start for start, _ in supervised_spans(document.mask)]
            if len(served.ids) not in starts:
                self.differing += 1
                return (
                    f"the prompt in {served.where} ends at position {len(served.ids)}, but training supervises from "
                    f"{starts} on: the generation prompts differ, or it is another turn's prompt"
                )
        if position is None:
            self.equal += 1
            return None
        self.differing += 1
        return (
            f"ids differ from {served.where} at position {position}\n"
            f"    training {_around(ids, position, decode)}\n"
            f"    server   {_around(served.ids, position, decode)}"
        )

    def skip(self, line: int) -> None:
        """Note that a line gives no document."""
        for place in [place for place in self._served if place[0] == line]:
            del self._served[place]
            self.of_dropped += 1

    def lines(self) -> list[str]:
        """The account in words."""
        left = f", {len(self._served)} of no document of {self.data}" if self._served else ""
        dropped = f", {self.of_dropped} of dropped rows" if self.of_dropped else ""
        return [f"  against {self.path}: {self.equal} equal, {self.differing} different{dropped}{left}"]


def _parse(value: Any, where: str, line: int) -> tuple[tuple[int, int], _Served]:
    key = next((key for key in (WHOLE, PROMPT) if isinstance(value, dict) and key in value), None)
    if key is None:
        raise ValueError(
            f"--against: {where} has neither {WHOLE!r} nor {PROMPT!r}. One of them holds the server's ids."
        )
    ids, place = value[key], (value.get("line", line), value.get("row", 0))
    for name, numbers in ((key, ids), ("line and row", list(place))):
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            raise ValueError(f"--against: {where}: {name} must be whole numbers, not {str(numbers)[:60]}.")
    return place, _Served(where, ids, key == PROMPT)


def _first_difference(ours: list[int], served: list[int], is_prompt: bool) -> int | None:
    """The first position at which the two differ or only one goes on (a prompt may end first)."""
    for position, (mine, theirs) in enumerate(zip(ours, served, strict=False)):
        if mine != theirs:
            return position
    if len(ours) == len(served) or (is_prompt and len(served) < len(ours)):
        return None
    return min(len(ours), len(served))


def _around(ids: list[int], position: int, decode: _Decode) -> str:
    if position >= len(ids):
        return f"ends after {decode(ids[-_AROUND:])!r}"
    before, after = ids[max(0, position - _AROUND) : position], ids[position : position + _AROUND]
    return f"{ids[position]}: {decode(before)!r} >>> {decode(after)!r}"
