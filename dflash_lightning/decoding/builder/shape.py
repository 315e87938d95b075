"""Shapes of trees: which node hangs where, before any token stands there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heappop, heappush

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dflash_lightning.device import send_list


@dataclass(frozen=True)
class Shape:
    """A tree per row: node 0 is the root, and child number ``rank`` of a node comes after those of lower rank.

    Nodes that a row does not need hang, not live, under the root. ``height`` is the depth of the deepest node of all.
    ``scores`` are the log-probabilities of the paths, 0 for the root, where the shape was chosen by them.
    """

    parents: Int[Tensor, "B N"]
    ranks: Int[Tensor, "B N"]
    depths: Int[Tensor, "B N"]
    live: Bool[Tensor, "B N"]
    height: int
    scores: Float[Tensor, "B N"] | None = None

    def masses(self) -> Float[Tensor, "B n"]:
        """The probability of the path to every node but the root, 0 where it is not live."""
        assert self.scores is not None, "this shape was not chosen by probabilities"
        return torch.where(self.live, self.scores, -torch.inf)[:, 1:].exp()

    def fill(self, values: Tensor) -> Tensor:
        """For every node but the root its entry of ``values`` ``[B, D, K]``, by depth and rank: ``[B, N - 1]``."""
        at = (self.depths[:, 1:] - 1).clamp_min(0) * values.shape[2] + self.ranks[:, 1:]
        return values.flatten(1).gather(1, at)

    def levels(self) -> list[Int[Tensor, "B W"]]:
        """For each depth its nodes that have children; rows that have fewer than others are filled up with the root."""
        rows = zip(self.parents[:, 1:].tolist(), self.depths[:, 1:].tolist(), self.live[:, 1:].tolist(), strict=True)
        parents: list[dict[int, list[int]]] = []  # of each row: depth -> nodes there that have children
        for row in rows:
            nodes: dict[int, dict[int, None]] = {}
            for parent, depth, live in zip(*row, strict=True):
                if live:
                    nodes.setdefault(depth - 1, {})[parent] = None
            parents.append({depth: list(found) for depth, found in nodes.items()})
        levels = []
        for depth in range(1 + max(max(row, default=0) for row in parents)):
            width = max(len(row.get(depth, ())) for row in parents)
            filled = [[*row.get(depth, ()), *[0] * (width - len(row.get(depth, ())))] for row in parents]
            levels.append(send_list(filled, self.parents.device))
        return levels


def best_first(log_probs: Float[Tensor, "B D K"], budget: int) -> Shape:
    """The ``budget`` likeliest paths of a row, where depth and rank give the probability (2604.12989, algorithm 1).

    ``log_probs`` fall with rank; a path's probability is the product over its depths, so a node never beats its parent
    or an older sibling, and taking the best node again and again gives the best tree of that size. Among equals the
    path with the lower ranks comes first, its beginning before all. Impossible nodes are never taken. The search runs
    on the host, where a heap is quicker than a device would be.
    """
    rows = [_best_first(row, budget) for row in log_probs.tolist()]
    size = budget + 1
    nodes = [[[*column, *[0] * (size - len(column))] for column in row[:3]] for row in rows]
    parents, ranks, depths = send_list(nodes, log_probs.device).unbind(1)
    scores = send_list([[*row[3], *[0.0] * (size - len(row[3]))] for row in rows], log_probs.device)
    live = send_list([[k < len(row[0]) for k in range(size)] for row in rows], log_probs.device)
    height = max(max(row[2]) for row in rows)
    return Shape(parents, ranks, depths, live, height, scores)


def _best_first(log_probs: list[list[float]], budget: int) -> tuple[list[int], list[int], list[int], list[float]]:
    """Parents, ranks, depths and log-probabilities of the root and of at most ``budget`` nodes, best first."""
    parents, ranks, depths, scores = [0], [0], [0], [0.0]
    # Cost, ranks since the root, parent, cost of the parent.
    heap: list[tuple[float, tuple[int, ...], int, float]] = [(-log_probs[0][0], (0,), 0, 0.0)]
    while heap and len(parents) <= budget:
        cost, path, parent, before = heappop(heap)
        if cost == math.inf:
            break
        depth, rank = len(path), path[-1]
        parents.append(parent)
        ranks.append(rank)
        depths.append(depth)
        scores.append(-cost)
        if rank + 1 < len(log_probs[0]):
            heappush(heap, (before - log_probs[depth - 1][rank + 1], (*path[:-1], rank + 1), parent, before))
        if depth < len(log_probs):
            heappush(heap, (cost - log_probs[depth][0], (*path, 0), len(parents) - 1, cost))
    return parents, ranks, depths, scores


def branching_shape(branching: list[int], batch_size: int, device: torch.device) -> Shape:
    """Every node at depth ``d`` has ``branching[d]`` children; depth by depth, siblings side by side."""
    parents, ranks, depths, last = [0], [0], [0], [0]
    for depth, count in enumerate(branching, start=1):
        first = len(parents)
        parents += [node for node in last for _ in range(count)]
        ranks += list(range(count)) * len(last)
        depths += [depth] * (count * len(last))
        last = list(range(first, len(parents)))
    table = send_list([parents, ranks, depths], device)[:, None].expand(-1, batch_size, -1)
    return Shape(table[0], table[1], table[2], torch.ones_like(table[0], dtype=torch.bool), height=len(branching))
