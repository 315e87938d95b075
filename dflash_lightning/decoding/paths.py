"""Paths in chains and trees of drafts: how deep nodes are, and how far a run of accepted ones reaches."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dflash_lightning.decoding.types import Draft, Verdict


def leading(stands: Bool[Tensor, "B D"]) -> Int[Tensor, " B"]:
    """How many entries of each row are true before the first false one."""
    return stands.long().cumprod(1).sum(1)


def along_paths(holds: Bool[Tensor, "B N"], parents: Int[Tensor, "B N"]) -> Bool[Tensor, "B N"]:
    """Whether something holds for a node and for every node above it. ``parents`` of the root is the root.

    By doubling: after ``i`` steps a node has heard of the ``2 ** i`` nodes at the end of its path.
    """
    reach = 1
    while reach < holds.shape[1]:
        holds = holds & holds.gather(1, parents)
        parents = parents.gather(1, parents)
        reach *= 2
    return holds


def live_nodes(draft: Draft) -> Bool[Tensor, "B N"]:
    """Which nodes may be accepted."""
    return torch.ones_like(draft.tokens, dtype=torch.bool) if draft.live is None else draft.live


def widths(draft: Draft) -> Int[Tensor, " B"]:
    """How many drafts of each row of a chain are live; they come first."""
    return live_nodes(draft)[:, 1:].sum(1)


def tree_verdict(draft: Draft, stands: Bool[Tensor, "B N"]) -> Verdict:
    """The verdict on a tree of which the nodes ``stands``, one path from the root; ``following`` is still to be set."""
    assert draft.parents is not None
    depth = draft.depth
    index = torch.arange(depth.shape[1], device=depth.device).expand_as(depth)
    accepted = torch.where(stands, depth, 0).amax(1)
    deepest = int(depth.max()) if draft.height is None else draft.height
    # Nodes that do not stand are written to the root's place, as the root.
    path = depth.new_zeros(len(depth), deepest + 1)
    path = path.scatter(1, torch.where(stands, depth, 0), torch.where(stands, index, 0))
    last = path.gather(1, accepted[:, None])
    more = ((draft.parents == last) & (index > 0) & live_nodes(draft)).any(1)
    return Verdict(accepted, last[:, 0], path, accepted + more.long())
