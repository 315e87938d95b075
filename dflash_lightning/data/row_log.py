"""A JSONL file that grows row by row in any order, survives a kill at any byte, and ends as one sorted file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from dflash_lightning.files import write_atomic

Row = dict[str, Any]


class RowLog:
    """Finished rows of a long job, appended to ``<out>.partial`` and flushed one line at a time.

    Every row has its number under ``row``. A line that a kill cut off is taken away at the next start, so its row is
    done again; ``finish`` turns the partial file into ``out``, with the rows in order of their numbers.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.partial = partial_path(out)
        self.rows: dict[int, Row] = {}
        if out.exists() and not self.partial.exists():
            out.replace(self.partial)
        if self.partial.exists():
            self._repair()
        self._file = self.partial.open("a", encoding="utf-8")

    def __enter__(self) -> RowLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def add(self, row: Row) -> None:
        """Append one finished row; it is on its way to the disk when this returns."""
        assert row["row"] not in self.rows, f"row {row['row']} was made twice"
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self.rows[row["row"]] = row

    def finish(self) -> None:
        """Write all rows to ``out`` in order, atomically; the partial file goes only after that."""
        self._file.close()
        write_atomic(self.out, "".join(json.dumps(self.rows[number]) + "\n" for number in sorted(self.rows)))
        self.partial.unlink()

    def _repair(self) -> None:
        """Read whole lines, cut the file after the last good one."""
        good = 0
        with self.partial.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    row = json.loads(line)
                except ValueError:
                    break
                self.rows.setdefault(row["row"], row)
                good += len(line)
        os.truncate(self.partial, good)


def partial_path(out: Path) -> Path:
    """Where the rows stand until all are done."""
    return out.with_name(out.name + ".partial")
