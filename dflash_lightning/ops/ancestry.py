"""Who stands above whom in token trees that are given by the parent of every node."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def ancestors_or_self(parents: Int[Tensor, "B N"]) -> Bool[Tensor, "B N N"]:
    """Entry ``[b, n, m]``: node ``m`` is node ``n`` or stands on its way to the root.

    Node 0 is the root and its own parent; parents precede their children. A node's depth is the number of its
    ancestors, so ``ancestors_or_self(parents).sum(-1) - 1``. Works by doubling: after ``i`` steps a node knows the
    ``2 ** i`` nodes at the end of its way, and the device is never waited for.
    """
    size = parents.shape[1]
    index = torch.arange(size, device=parents.device)
    known = (index[:, None] == index) | (parents[:, :, None] == index)
    jump, reach = parents, 2  # ``jump`` is ``reach / 2`` steps above; ``known`` spans ``reach`` nodes
    while reach < size:
        jump = jump.gather(1, jump)
        known = known | known.gather(1, jump[:, :, None].expand_as(known))
        reach *= 2
    return known
