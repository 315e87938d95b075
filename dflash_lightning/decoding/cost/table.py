"""What a round costs, as a table of measured seconds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dflash_lightning.decoding.cost.regression import rising, rising_convex

_LINE_FROM, _LINE_TO = 16, 128  # judged tokens between which a straight cost line is fitted (CAST's probe)


@dataclass(frozen=True)
class CostTable:
    """``verify[c][n]`` seconds for the target to judge ``nodes[n]`` tokens after ``contexts[c]`` committed ones.

    ``nodes`` count the root: a tree of ``k`` nodes under it is ``k + 1`` judged tokens. ``draft[c]`` are the seconds
    before that: proposing and building. Between the entries it goes on linearly, and so it does beyond them, by the
    last slope. One judged token is the least there is.
    """

    nodes: tuple[int, ...]
    contexts: tuple[int, ...]
    verify: tuple[tuple[float | int, ...], ...]
    draft: tuple[float | int, ...]

    def seconds(self, most: int, context: float | int) -> list[float]:
        """A whole round with 0 to ``most`` nodes besides the root, where ``context`` tokens are committed."""
        rows = [[interpolated(self.nodes, row, count) for count in range(1, most + 2)] for row in self.verify]
        whole = [[draft + seconds for seconds in row] for draft, row in zip(self.draft, rows, strict=True)]
        return [interpolated(self.contexts, column, context) for column in zip(*whole, strict=True)]

    def rising(self) -> CostTable:
        """The same without falls from entry to entry: more tokens never cost less; noise of a clock would say so."""
        return self._with(rising)

    def convex(self) -> CostTable:
        """The nearest table that rises ever faster with the nodes, for which the first stop is the best one."""
        return self._with(lambda row: rising_convex(self.nodes, row))

    def straight(self) -> CostTable:
        """The straight line through the entries of 16 to 128 judged tokens (all, if fewer than two are there)."""
        inside = [place for place, count in enumerate(self.nodes) if _LINE_FROM <= count <= _LINE_TO]
        used = inside if len(inside) > 1 else list(range(len(self.nodes)))

        def line(row: Sequence[float | int]) -> list[float]:
            first, slope = line_through([self.nodes[i] for i in used], [row[i] for i in used])
            return [first + max(slope, 0.0) * count for count in self.nodes]

        return self._with(line)

    def _with(self, change: Callable[[Sequence[float | int]], list[float]]) -> CostTable:
        return replace(self, verify=tuple(tuple(change(row)) for row in self.verify))

    def plain(self) -> dict[str, Any]:
        """The table as JSON has it."""
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> CostTable:
        """The inverse of ``plain``."""
        verify = tuple(tuple(row) for row in plain["verify"])
        return cls(tuple(plain["nodes"]), tuple(plain["contexts"]), verify, tuple(plain["draft"]))


def line_through(places: Sequence[float | int], values: Sequence[float | int]) -> tuple[float, float]:
    """``c0`` and ``c1`` of the line ``c0 + c1 x`` nearest to the values."""
    x, y = torch.tensor(places, dtype=torch.float64), torch.tensor(values, dtype=torch.float64)
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    return float(y.mean() - slope * x.mean()), float(slope)


def interpolated(places: Sequence[float | int], values: Sequence[float | int], at: float | int) -> float:
    """The value at a place, on straight lines between rising ``places``; beyond them the lines at the ends go on."""
    if len(places) == 1:
        return values[0]
    left = min(max(bisect_right(places, at) - 1, 0), len(places) - 2)
    share = (at - places[left]) / (places[left + 1] - places[left])
    return values[left] + share * (values[left + 1] - values[left])
