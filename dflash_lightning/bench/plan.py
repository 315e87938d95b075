"""What a folder of runs says of the sweeps that write it: which points there are to be, so that none goes missing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_lightning.bench.method import of_method
from dflash_lightning.bench.points import Point
from dflash_lightning.files import write_atomic

PLAN = "points"  # the folder inside a folder of runs


@dataclass(frozen=True)
class Plan:
    """Files of the sweeps in a folder of runs: per point what it is, the output of its processes, and a lock."""

    folder: Path

    def run(self, point: Point) -> Path:
        """The run folder of a point."""
        return self.folder / point.name

    def log(self, point: Point) -> Path:
        """What its processes said, all tries below one another."""
        return self.folder / PLAN / f"{point.name}.log"

    def lock(self, point: Point) -> Path:
        """Locked by who makes the point now, and by the process that does its work."""
        return self.folder / PLAN / f".{point.name}.lock"

    def write(self, points: list[Point]) -> None:
        """Note that these points are to be made; points of other sweeps stay."""
        for point in points:
            told = {"recipe": point.recipe, "overrides": list(point.overrides)}
            write_atomic(self.folder / PLAN / f"{point.name}.json", json.dumps(told) + "\n")

    def read(self) -> dict[str, dict[str, Any]]:
        """``recipe``, ``overrides`` (of the method) and ``seed`` of every point there is to be, by its name.

        Raises:
            ValueError: a file is damaged.
        """
        found = {}
        for file in sorted((self.folder / PLAN).glob("*.json")):
            try:
                told = json.loads(file.read_text(encoding="utf-8"))
                words = [str(word) for word in told["overrides"]]
                seeds = [word.partition("=")[2] for word in words if word.startswith("seed=")]
                found[file.stem] = {
                    "recipe": str(told["recipe"]),
                    "overrides": of_method(words),
                    "seed": int(seeds[-1]) if seeds and seeds[-1].isdigit() else None,
                }
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{file}: damaged ({error}). Give the dflash sweep command again: it writes it."
                ) from error
        return found
