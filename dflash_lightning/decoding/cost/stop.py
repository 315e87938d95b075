"""How many nodes are worth their time: tokens expected of a round over the seconds that it takes."""

from __future__ import annotations

from collections.abc import Sequence


def rates(masses: Sequence[float | int], seconds: Sequence[float | int], rows: int = 1) -> list[float]:
    """``theta_n``: tokens per second with the first ``n`` nodes, for ``n`` from 0 (CaDDTree, arXiv 2606.01813).

    ``theta_n = (rows + masses[0] + .. + masses[n - 1]) / seconds[n]``: every one of ``rows`` texts gains the target's
    own token, and node ``i`` stands with the probability of its path. ``masses`` of several rows are added node by
    node: rows of a batch are judged together, with equally many nodes.
    """
    tokens, found = float(rows), [rows / seconds[0]]
    for mass, spent in zip(masses, seconds[1:], strict=True):
        tokens += mass
        found.append(tokens / spent)
    return found


def first_stop(theta: Sequence[float | int]) -> int:
    """The number of nodes before the first one that brings no gain.

    Where paths come best first and the cost is convex, this is the best number of all: ``theta_n`` is the mediant of
    ``theta_{n-1}`` and of the last node's own rate, which only falls, so that once it falls it never rises again.
    """
    for count in range(1, len(theta)):
        if theta[count] <= theta[count - 1]:
            return count - 1
    return len(theta) - 1


def best_stop(theta: Sequence[float | int]) -> int:
    """The best number of nodes, the least among equals: for costs with steps, as those of tiled kernels."""
    return max(range(len(theta)), key=theta.__getitem__)
