"""What a width policy leaves of a draft, without the nodes that no row needs."""

from __future__ import annotations

from dataclasses import replace

import torch

from dflash_lightning.decoding.policy import WidthPolicy
from dflash_lightning.decoding.types import Draft, Round
from dflash_lightning.device import send_list


def cut_draft(draft: Draft, policy: WidthPolicy, where: Round, decoding: list[bool]) -> tuple[Draft, list[bool]]:
    """The draft cut to the widths that ``policy`` gives, and which of its rows have lost nodes by that.

    Nodes behind the last one that any row needs are not there any more, so that verification costs less; one draft
    stays in any case, dead or not. Rows with ``decoding`` false have ended: they follow the widest of the others. Waits
    for the device once.
    """
    rows = send_list(decoding, draft.tokens.device)
    width = policy.width(draft, replace(where, live=rows)).clamp_min(0)
    width = torch.where(rows, width, torch.where(rows, width, 0).amax())
    cut = draft.cut(width)
    assert cut.live is not None
    before = torch.ones_like(cut.live) if draft.live is None else draft.live
    num_nodes = draft.tokens.shape[1]
    seen = torch.cat([cut.live.any(0), cut.live.all(0), (before & ~cut.live).any(1)]).tolist()
    needed = max(node for node in range(num_nodes) if seen[node] or node <= 1) + 1
    cut = cut.narrow(needed)
    if all(seen[num_nodes : num_nodes + needed]):
        cut.live = None  # nothing of what is left is dead in any row: the quick way is right
    return cut, seen[2 * num_nodes :]
