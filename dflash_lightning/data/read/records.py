"""Data files as records, one after the other: JSON lines, JSON lists of any size, Parquet, plain or compressed.

A record that cannot be read becomes a ``BadRecord`` and reading goes on; whether that is an error is for others to say.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dflash_lightning.data.read.compression import CutOff, Damaged, open_plain, read_up_to
from dflash_lightning.data.read.tables import read_parquet, read_saved

Format = Literal["jsonl", "json", "parquet", "dataset"]
FORMATS: tuple[Format, ...] = ("jsonl", "json", "parquet", "dataset")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_SUFFIXES: dict[str, Format] = {".json": "json", ".parquet": "parquet"}
_BOM = b"\xef\xbb\xbf"
_CHUNK = 1 << 20  # bytes of a JSON list read at a time
_SPACE = re.compile(r"[ \t\r\n\ufeff]*")  # a byte-order mark may stand first
_TAIL = 12  # json reports a literal, number or escape that is cut off at most so far before the end of the text
_FOREIGN = {  # how files of other kinds begin
    b"PAR1": "a Parquet file: name it .parquet, or set format: parquet",
    b"ARROW1": "an Arrow file: save it as Parquet, or with datasets' save_to_disk",
    b"\xff\xfe": "text in UTF-16 or UTF-32: save it as UTF-8",
    b"\xfe\xff": "text in UTF-16: save it as UTF-8",
    b"\x00\x00\xfe\xff": "text in UTF-32: save it as UTF-8",
    b"{\x00": "text in UTF-16 or UTF-32: save it as UTF-8",
    b"[\x00": "text in UTF-16 or UTF-32: save it as UTF-8",
    b"\x00{": "text in UTF-16: save it as UTF-8",
    b"\x00[": "text in UTF-16: save it as UTF-8",
    b"\xff\xff\xff\xff": "an Arrow stream: save it as Parquet, or with datasets' save_to_disk",
    b"PK\x03\x04": "a zip archive: unpack it",
    b"SQLite format 3": "a data base: save its rows as JSON lines",
    b"version https://git-lfs": "a pointer of Git LFS: get the file itself with `git lfs pull`",
    b"<": "a web page or XML: was the file downloaded whole, with a login?",
    **dict.fromkeys((b"\x1f\x8b", b"\x1f\x9d", b"\x04\x22\x4d\x18"), "packed (again): unpack it once"),
}
_TAR_MAGIC = slice(257, 262), b"ustar"


class _Twice(Exception):
    """A key stands twice in one object, with different values."""


class _Unusable(str):
    """Why a record of a list cannot be used, where its end is known all the same."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        for key, value in pairs:
            if value != found[key]:
                raise _Twice(f"the key {key!r} twice in one object, with different values. Remove one")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
_WITHOUT_INTEGERS = json.JSONDecoder(parse_int=len)  # finds the end of a record whose integers Python refuses
_TOO_LONG = f"an integer of more than {sys.get_int_max_str_digits()} digits"


@dataclass(frozen=True)
class Record:
    """A record's value and where it stands: the line it begins at, or its number in a table, counted from 1."""

    file: str
    line: int
    value: Any

    @property
    def where(self) -> str:
        """File and line, as messages name them."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be used and why; ``cut`` where the file simply ends in the middle of it."""

    file: str
    line: int
    reason: str
    cut: bool = False

    @property
    def where(self) -> str:
        """File and line, as messages name them."""
        return f"{self.file}:{self.line}"


def format_of(path: Path) -> Format:
    """What a file or folder holds, by its name (a compressed one's without the last suffix); else JSON lines."""
    if path.is_dir():
        return "dataset"
    plain = path.with_suffix("") if path.suffix in _COMPRESSED else path
    return _SUFFIXES.get(plain.suffix, "jsonl")


def read_records(file: Path, format: Format, *, split: str | None = None) -> Iterator[Record | BadRecord]:
    """Records of one file (or folder of a saved data set) in order, never the whole of it in memory.

    Raises:
        ValueError: the file as a whole is not what it should be, cannot be read to its end, or an optional package is
            missing.
    """
    records = _records(file, format, split)
    while True:
        try:
            record = next(records)
        except StopIteration:
            return
        except OSError as error:  # of a disk or a network, in words that do not name the file
            raise ValueError(f"{file}: cannot be read ({error}). Copy it to a disk of this machine.") from error
        yield record


def _records(file: Path, format: Format, split: str | None) -> Iterator[Record | BadRecord]:
    if format == "parquet":
        yield from (Record(str(file), number, value) for number, value in enumerate(read_parquet(file), start=1))
    elif format == "dataset":
        yield from (Record(str(file), number, value) for number, value in enumerate(read_saved(file, split), start=1))
    elif format == "json" and _first_byte(file) == b"[":
        yield from _json_list(file)
    else:
        yield from _json_lines(file, strict_start=format == "json")


# -- JSON lines -------------------------------------------------------------------------------------------------------


def _json_lines(file: Path, *, strict_start: bool) -> Iterator[Record | BadRecord]:
    """A record a line; blank lines are none. ``strict_start`` refuses a file that does not begin like that."""
    number = 0
    with open_plain(file) as stream:
        try:
            for number, line in enumerate(stream, start=1):
                if number == 1:
                    _check_kind(file, line)
                    line = line.removeprefix(_BOM)
                if line.strip():
                    record = _parse_line(file, number, line)
                    if strict_start and isinstance(record, BadRecord) and not record.cut:
                        raise ValueError(
                            f"{record.where}: {record.reason} A .json file holds one list of records, or JSON lines."
                        )
                    strict_start = False
                    yield record
        except CutOff as reason:
            yield BadRecord(str(file), number + 1, f"{reason}.", cut=True)
        except Damaged as reason:
            raise _damaged(file, number, reason) from None


def _check_kind(file: Path, line: bytes) -> None:
    """Refuse a file of another kind as a whole: otherwise each of its lines is an error that says nothing."""
    for begin, what in _FOREIGN.items():
        if line.startswith(begin):
            raise ValueError(f"{file}: is no JSON in UTF-8 but {what}.")
    place, magic = _TAR_MAGIC
    if line[place] == magic:
        raise ValueError(f"{file}: is no JSON in UTF-8 but a tar archive: unpack it.")


def _parse_line(file: Path, number: int, line: bytes) -> Record | BadRecord:
    try:
        return Record(str(file), number, _DECODER.decode(line.decode("utf-8")))
    except _Twice as error:
        return BadRecord(str(file), number, f"{error}.")
    except json.JSONDecodeError as error:
        what = f"not valid JSON ({error.msg}, column {error.colno})"
    except UnicodeDecodeError as error:
        what = f"not valid UTF-8 (byte {error.start + 1} of the line)"
    except RecursionError:
        what = "not valid JSON (nested too deeply)"
    except ValueError:
        what = _TOO_LONG
    reason = f"{what}. Every line of a .jsonl file is one JSON object; correct or remove this line."
    return BadRecord(str(file), number, reason, cut=not line.endswith(b"\n"))


# -- JSON lists -------------------------------------------------------------------------------------------------------


def _first_byte(file: Path) -> bytes:
    with open_plain(file) as stream:
        try:
            text = stream.read(len(_BOM)).removeprefix(_BOM).lstrip()
            while not text and (piece := stream.read(64)):
                text = piece.lstrip()
        except CutOff:
            return b""
        except Damaged as reason:
            raise _damaged(file, 0, reason) from None
    return text[:1]


def _json_list(file: Path) -> Iterator[Record | BadRecord]:
    """Records of a list as they come. One that the end of the file cuts off is bad; so is a list that nobody closed.

    Raises:
        ValueError: the list is broken in the middle, and what follows cannot be told apart any more.
    """
    with open_plain(file) as stream:
        reader = _ListReader(stream, file)
        reader.skip()  # the bracket
        line = reader.line
        try:
            while reader.peek() != "]":
                line = reader.line
                value = reader.value()
                bad = isinstance(value, _Unusable)
                yield BadRecord(str(file), line, f"{value}.") if bad else Record(str(file), line, value)
                if reader.peek() == ",":
                    reader.skip()
                elif reader.peek() != "]":
                    reader.refuse("a comma or closing bracket is missing")
            reader.skip()
            if reader.peek():
                reader.refuse("the list ends, and more follows that would be lost")
        except _Incomplete as reason:
            what = f"not valid JSON ({reason}). The list ends in the middle of this record: was the file cut off?"
            yield BadRecord(str(file), max(line, reader.line), what, cut=True)


class _Incomplete(Exception):
    """The text ends before the value does."""


class _ListReader:
    """A window on a JSON text that moves forward: at most one record and a chunk are held."""

    def __init__(self, stream: io.BufferedReader, file: Path) -> None:
        self._stream, self._file = stream, file
        self._text, self._position, self._at_end = "", 0, False
        self._line, self._counted = 1, 0
        self._open = b""

    @property
    def line(self) -> int:
        """Line of the next character that is no white space, counted from 1."""
        self.peek()
        self._line += self._text.count("\n", self._counted, self._position)
        self._counted = self._position
        return self._line

    def peek(self) -> str:
        """The next character that is no white space; empty at the end of the file."""
        while True:
            space = _SPACE.match(self._text, self._position)
            assert space is not None
            self._position = space.end()
            if self._position < len(self._text) or self._at_end:
                return self._text[self._position : self._position + 1]
            self._more()

    def skip(self) -> None:
        self.peek()
        self._position += 1

    def value(self) -> Any:
        """The JSON value that begins here, or why it is ``_Unusable``.

        Raises:
            _Incomplete: the file ends too early.
        """
        while True:
            try:
                value, end = self._decode()
            except json.JSONDecodeError as error:
                if not error.msg.startswith("Unterminated string") and error.pos < len(self._text) - _TAIL:
                    self.refuse(f"{error.msg}, {error.pos - self._position} characters into the record")
                if self._at_end:
                    raise _Incomplete(error.msg) from None
            except RecursionError:
                self.refuse("nested too deeply")
            else:
                if end < len(self._text) or self._at_end:
                    self._position = end
                    return value
            self._more()

    def _decode(self) -> tuple[Any, int]:
        try:
            return _DECODER.raw_decode(self._text, self._position)
        except json.JSONDecodeError:
            raise
        except _Twice as error:
            return _Unusable(error), _WITHOUT_INTEGERS.raw_decode(self._text, self._position)[1]
        except ValueError:  # what Python says of an integer of too many digits, without a place
            return _Unusable(_TOO_LONG), _WITHOUT_INTEGERS.raw_decode(self._text, self._position)[1]

    def refuse(self, what: str) -> None:
        if not self.peek():
            raise _Incomplete("the list is not closed")
        raise ValueError(
            f"{self._file}:{self.line}: not valid JSON ({what}). A .json file holds one list of records. Mend it "
            "there, or convert it to JSON lines, where a bad record leaves the others readable."
        )

    def _more(self) -> None:
        """Forget what has been read and lengthen the window, by half at least: long records take linear time."""
        self._line += self._text.count("\n", self._counted, self._position)
        rest = self._text[self._position :]
        self._position = self._counted = 0
        try:
            data, self._at_end = read_up_to(self._stream, max(_CHUNK, len(rest) // 2))
        except Damaged as reason:
            raise _damaged(self._file, self._line, reason) from None
        data = self._open + data
        end = len(data) if self._at_end else len(data) - _open_bytes(data)
        self._open = data[end:]
        # What is no UTF-8 becomes half surrogates, which no row may hold.
        self._text = rest + data[:end].decode("utf-8", errors="surrogateescape")


def _open_bytes(data: bytes) -> int:
    """Bytes at the end of ``data`` that begin a UTF-8 character and do not finish it."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            return back if back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else 0
        if byte < 0x80:
            return 0
    return 0


def _damaged(file: Path, line: int, reason: Damaged) -> ValueError:
    return ValueError(
        f"{file}: damaged after line {line} ({reason}). Get the file again, or save what can be unpacked."
    )
