"""Trees read from a table of laws after the likeliest parents, for heads that remember one token."""

from __future__ import annotations

import math
from heapq import heappop, heappush

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.decoding.builder.base import DraftBuilder, needs_paths
from dflash_lightning.decoding.builder.best_first import check_budget
from dflash_lightning.decoding.builder.grow import likeliest
from dflash_lightning.decoding.builder.steps import as_steps
from dflash_lightning.decoding.law import highest
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Round, Scores
from dflash_lightning.device import send_list
from dflash_lightning.errors import SettingError
from dflash_lightning.types import token_ids


class TableTree(DraftBuilder):
    """The best tree over laws that are asked for beforehand, after ``parents`` tokens per slot (TreeFlash, 2606.03819).

    The law of slot 1 follows the root. That of a later slot is asked for after each of the ``parents`` likeliest tokens
    of the slot before, as the *first look* has them: so all laws are known before any path is. Each keeps its
    ``branch`` best children. Over this table paths are taken best first, among equals the lower ranks first. A child
    that is not among the parents of its slot has no law after it, and is a leaf. Where laws depend on no token, this is
    the tree of ``BestFirstTree``, as far as its nodes are among the parents.

    The head must remember one token: with a state that depends on the whole path there is no such table. Drafts are
    chosen without chance; equality with the target's own tokens judges them.

    Raises:
        ValueError: a number is below 1.
    """

    name = "table_tree"
    drawn = "delta"
    trees = True
    single_tokens = True

    def __init__(
        self,
        *,
        budget: int | None = None,  # nodes besides the root; null: one per slot
        parents: int = 16,  # tokens per slot after which a law is asked for
        branch: int = 16,  # children kept per law
    ) -> None:
        check_budget(budget)
        for key, value in (("parents", parents), ("branch", branch)):
            if value < 1:
                raise SettingError(f"decoding.builder.{key}", f"{value} leaves no draft", "Use 1 or more (16 is usual)")
        self.budget = budget
        self.parents = parents
        self.branch = branch

    def num_nodes(self, num_drafts: int) -> int:
        return num_drafts if self.budget is None else self.budget

    def build(self, roots: Int[Tensor, " B"], scores: Scores, where: Round, sampler: Sampler) -> Draft:
        budget = self.num_nodes(scores.logits.shape[1])
        values, tokens, onward = read_table(roots, scores, self.parents, self.branch)
        rows = [best_paths(*row, budget) for row in zip(values.tolist(), onward.tolist(), strict=True)]
        filled = [[*row, *[(0, 0, 0, 0)] * (budget - len(row))] for row in rows]
        parent, depth, law, rank = send_list(filled, roots.device).view(len(rows), budget, 4).unbind(-1)
        at = (depth * values.shape[2] + law) * values.shape[3] + rank
        live = send_list([[node <= len(row) for node in range(budget + 1)] for row in rows], roots.device)
        return Draft(
            torch.cat([roots[:, None], tokens.flatten(1).gather(1, at)], dim=1),
            self.drawn,
            parents=torch.cat([torch.zeros_like(roots)[:, None], parent], dim=1),
            live=live,
            signals=scores.signals,
        )


def read_table(
    roots: Int[Tensor, " B"], scores: Scores, parents: int, branch: int
) -> tuple[Float[Tensor, "B D m k"], Int[Tensor, "B D m k"], Int[Tensor, "B D m k"]]:
    """The ``branch`` best children of each slot after each parent: log-probabilities, tokens, and where each goes on.

    ``onward`` is the place of a child among the parents of the next slot, -1 where it is none. Slot 1 has one parent,
    the root; its other places have children of probability 0.

    Raises:
        ValueError: the head keeps a state from token to token, and did not say so (``keeps_state``) before decoding.
    """
    if scores.state is not None:
        raise needs_paths("TableTree")
    step = as_steps(scores)
    num_drafts, columns = scores.logits.shape[1:]
    count, kept = min(parents, columns), min(branch, columns)
    places = highest(scores.logits.float(), count)[1]
    heads = token_ids(places, scores.ids)  # [B, D, m]: after which tokens of a slot the next one is asked
    found = []
    for depth in range(num_drafts):
        before = roots[:, None] if depth == 0 else heads[:, depth - 1]
        laws, _ = step(None, before, depth)
        values, tokens = likeliest(laws, depth, kept)
        if depth == 0:
            values = torch.nn.functional.pad(values, (0, 0, 0, count - 1), value=-torch.inf)
            tokens = torch.nn.functional.pad(tokens, (0, 0, 0, count - 1))
        same = tokens[..., None] == heads[:, depth, None, None]
        onward = torch.where(same.any(-1), same.long().argmax(-1), -1)
        found.append((values, tokens, onward))
    values, tokens, onward = (torch.stack(column, dim=1) for column in zip(*found, strict=True))
    return values, tokens, onward


def best_paths(
    values: list[list[list[float]]], onward: list[list[list[int]]], budget: int
) -> list[tuple[int, int, int, int]]:
    """Parent, slot, law and rank of at most ``budget`` nodes, best path first; nodes are numbered from 1.

    ``values`` of a law fall with the rank, so a path never beats its beginning or its older sibling.
    """
    nodes: list[tuple[int, int, int, int]] = []
    # Cost, ranks since the root, parent, slot, law, cost of the parent.
    heap: list[tuple[float, tuple[int, ...], int, int, int, float]] = [(-values[0][0][0], (0,), 0, 0, 0, 0.0)]
    while heap and len(nodes) < budget:
        cost, path, parent, slot, law, before = heappop(heap)
        if cost == math.inf:
            break
        rank = path[-1]
        nodes.append((parent, slot, law, rank))
        if rank + 1 < len(values[slot][law]):
            heappush(heap, (before - values[slot][law][rank + 1], (*path[:-1], rank + 1), parent, slot, law, before))
        after = onward[slot][law][rank]
        if slot + 1 < len(values) and after >= 0:
            heappush(heap, (cost - values[slot + 1][after][0], (*path, 0), len(nodes), slot + 1, after, cost))
    return nodes
