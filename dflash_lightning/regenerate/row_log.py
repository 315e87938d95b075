"""The memory of a long job: finished rows in any order, which survive a kill at any byte, and one writer at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from dflash_lightning.files import open_locked

Row = dict[str, Any]


class RowLog:
    """Finished work in ``<out>.partial``: one line per entry, the list of rows that one input row gave.

    An entry counts when its whole line is in the file. What a kill cut off is taken away at the next start, so that its
    input is done again; entries are found by their place in the file, so memory holds no rows. The file is locked for
    as long as the log is open: the lock goes with the process, however that ends. Closing a log without entries leaves
    no file.

    Raises:
        ValueError: another process has the log open.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.partial = partial_path(out)
        self.partial.parent.mkdir(parents=True, exist_ok=True)
        self._removed = False
        self._file = self._open()
        self._places: dict[int, int] = {}  # number of the input row -> offset of its entry
        self._repair()

    def __enter__(self) -> RowLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._places and not self._removed:
            self.remove()
        self._file.close()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def add(self, number: int, rows: list[Row]) -> None:
        """Append what input row ``number`` became; the system has it when this returns."""
        assert number not in self._places, f"row {number} was made twice"
        offset = self._file.seek(0, 2)
        self._file.write(json.dumps({"number": number, "rows": rows}).encode() + b"\n")
        self._file.flush()
        self._places[number] = offset

    def in_order(self) -> Iterator[list[Row]]:
        """The entries by input row, read from the file."""
        for number in sorted(self._places):
            self._file.seek(self._places[number])
            yield json.loads(self._file.readline())["rows"]

    def finish(self, rows: Iterable[Row]) -> None:
        """Write ``rows`` to ``out``, whole or not at all. The log stays until ``remove``: nothing else is done yet."""
        draft = self.out.with_name(self.out.name + ".unfinished")  # a fixed name: who holds the lock is the only one
        with draft.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.out)

    def remove(self) -> None:
        """Delete the file: all that it holds stands elsewhere, or it holds nothing."""
        self.partial.unlink()
        self._places.clear()
        self._removed = True  # from now on a file of that name may be another process's

    def _open(self) -> IO[bytes]:
        file = open_locked(self.partial)
        if file is None:
            raise ValueError(
                f"{self.out}: another process is writing it now ({self.partial.name} is locked). Wait until that "
                "one has ended, or write to another file."
            )
        return file

    def _repair(self) -> None:
        """Find the whole entries, cut the file after the last good one."""
        good = 0
        self._file.seek(0)
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            try:
                number = json.loads(line)["number"]
            except ValueError:
                break
            self._places.setdefault(number, good)
            good += len(line)
        self._file.truncate(good)


def partial_path(out: Path) -> Path:
    """Where the rows stand until all are done."""
    return out.with_name(out.name + ".partial")
