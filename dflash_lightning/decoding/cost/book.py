"""Measured costs, kept in a file by what they hold for, and in memory for as long as the process runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dflash_lightning.decoding.cost.table import CostTable
from dflash_lightning.files import write_atomic

FILE = "costs.json"


@dataclass
class CostBook:
    """Tables in ``folder`` (null: in memory only), each for one ``place``: machine, models, batch and lengths.

    A place is measured once. On another machine the file has no entry for it, and gets one.
    """

    folder: Path | None = None
    known: ClassVar[dict[str, CostTable]] = {}

    def table(self, place: dict[str, Any], measure: Callable[[], CostTable]) -> CostTable:
        """The table for ``place``; ``measure`` is called where there is none.

        Raises:
            ValueError: the file is damaged.
        """
        key = json.dumps(place, sort_keys=True)
        written = self._read()
        for entry in written:
            if json.dumps(entry["place"], sort_keys=True) == key:
                self.known[key] = CostTable.of(entry["table"])
                return self.known[key]
        if key not in self.known:
            self.known[key] = measure()
        if self.folder is not None:
            written.append({"place": place, "table": self.known[key].plain()})
            write_atomic(self.folder / FILE, json.dumps(written, indent=1) + "\n")
        return self.known[key]

    def _read(self) -> list[dict[str, Any]]:
        if self.folder is None or not (self.folder / FILE).exists():
            return []
        file = self.folder / FILE
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            assert all({"place", "table"} <= entry.keys() for entry in found)
        except (ValueError, AssertionError, AttributeError, TypeError) as error:
            raise ValueError(f"{file}: damaged ({error}). Delete it: the costs are measured anew.") from error
        return list(found)
