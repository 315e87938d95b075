"""What a round costs, by the arithmetic and the memory traffic of the target: the slower of the two decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dflash_lightning.decoding.cost.regression import not_negative
from dflash_lightning.decoding.cost.table import CostTable
from dflash_lightning.types import TargetFacts

_TURNS = 30


@dataclass(frozen=True)
class Roofline:
    """``C(s, c) = max(arithmetic, memory)`` seconds to judge ``s`` tokens after ``c`` (Bastion, arXiv 2605.29727).

    Each side is a line, ``slope * amount + base``, in floating-point operations (``operations``) or numbers moved
    (``moved``). The peak rates of the machine are in the slopes. ``draft`` are the seconds of a round before that.

    The form and its variables are the paper's. How the four coefficients are fitted is RECONSTRUCTED: entries are
    assigned to the line that is higher there, each line is fitted to its own by relative least squares with
    coefficients that are not negative, and this is repeated.
    """

    facts: TargetFacts
    batch_size: int
    arithmetic: tuple[float, float]
    memory: tuple[float, float]
    draft: float

    def verify(self, tokens: float | int, context: float | int) -> float:
        """Seconds to judge ``tokens`` of each row after ``context``."""
        operations, moved = amounts(self.facts, tokens, context, self.batch_size)
        return max(self.arithmetic[0] * operations + self.arithmetic[1], self.memory[0] * moved + self.memory[1])

    def seconds(self, most: int, context: float | int) -> list[float]:
        """A whole round with 0 to ``most`` nodes besides the root, where ``context`` tokens are committed."""
        return [self.draft + self.verify(count, context) for count in range(1, most + 2)]

    @classmethod
    def fitted(cls, table: CostTable, facts: TargetFacts, batch_size: int) -> Roofline:
        """The roofline nearest to measured seconds."""
        entries = [
            (*amounts(facts, tokens, context, batch_size), seconds)
            for context, row in zip(table.contexts, table.verify, strict=True)
            for tokens, seconds in zip(table.nodes, row, strict=True)
        ]
        arithmetic, memory = two_lines(entries)
        return cls(facts, batch_size, arithmetic, memory, sum(table.draft) / len(table.draft))


def amounts(facts: TargetFacts, tokens: float | int, context: float | int, batch_size: int) -> tuple[float, float]:
    """Floating-point operations, and numbers read or written, of one forward of ``tokens`` after ``context``.

    Weights are read once for all rows, keys and values of every row once; each token is multiplied with all weights and
    attends to the context and to the tokens of its own forward.
    """
    heads, groups = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    layer = facts.hidden_size * (2 * heads + 2 * groups + 3 * facts.intermediate_size)
    weights = facts.num_layers * layer + facts.hidden_size * facts.vocab_size
    seen = context + tokens
    operations = batch_size * tokens * (2 * weights + 4 * facts.num_layers * heads * seen)
    moved = weights + batch_size * (2 * facts.num_layers * groups * seen + tokens * facts.vocab_size)
    return float(operations), float(moved)


def two_lines(
    entries: Sequence[tuple[float | int, float | int, float | int]],
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Slope and base of two lines whose maximum is nearest to entries ``(x of one, x of the other, value)``."""
    data = torch.tensor(entries, dtype=torch.float64)
    first, second, values = data.unbind(1)
    upper = first >= first.median()  # many operations: arithmetic decides
    one = other = (0.0, 0.0)
    for _ in range(_TURNS):
        one, other = _line(first, values, upper), _line(second, values, ~upper)
        again = one[0] * first + one[1] >= other[0] * second + other[1]
        if bool((again == upper).all()):
            break
        upper = again
    return one, other


def _line(x: Float[Tensor, " n"], y: Float[Tensor, " n"], own: Bool[Tensor, " n"]) -> tuple[float, float]:
    """The line nearest to the entries that are its own, by relative error; none where it has fewer than two."""
    if int(own.sum()) < 2:
        return 0.0, 0.0
    scale = x.abs().max().clamp_min(1e-30)
    columns = torch.stack([x[own] / scale, torch.ones_like(x[own])], dim=1) / y[own][:, None]
    slope, base = not_negative(columns, torch.ones_like(y[own])).tolist()
    return slope / float(scale), base
