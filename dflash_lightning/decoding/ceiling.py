"""What a longer block could gain, from how far rounds came in a shorter one (DBloom, arXiv 2608.30427)."""

from __future__ import annotations

import math
from collections.abc import Sequence

_TAIL = 3  # last slots from which it is told how drafts survive behind them


def survival_of(histogram: Sequence[int]) -> list[float]:
    """Share of rounds whose first ``k`` drafts stood, for ``k`` from 1; in ``histogram[n]`` rounds ``n`` stood."""
    total = sum(histogram)
    return [sum(histogram[k:]) / total if total else math.nan for k in range(1, len(histogram))]


def headroom(ceiling: float, new_slots: int) -> float:
    """The most tokens per round that ``new_slots`` more can add where ``ceiling`` of the rounds filled the block."""
    return ceiling * new_slots


def expected_gain(survival: Sequence[float], new_slots: int) -> float:
    """Tokens per round that ``new_slots`` more would add if each of their drafts stood as often as the last ones did.

    ``ceiling * (a + a^2 + ...)``, where ``a`` is the share of drafts that stand at the end of the block, given that
    those before them do: the mean over its last slots. The formula is ours, and so is the mean. What a longer block
    loses in front of the new slots is not in it.
    """
    before = [1.0, *survival]
    shares = [now / then for then, now in zip(before, survival, strict=False) if then > 0][-_TAIL:]
    if not shares or not survival[-1] > 0:
        return 0.0
    share = sum(shares) / len(shares)
    return survival[-1] * sum(share**k for k in range(1, new_slots + 1))
