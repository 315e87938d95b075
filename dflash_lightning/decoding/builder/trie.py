"""Chains that share their beginnings, joined into one tree."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from dflash_lightning.decoding.types import Draft


def join_chains(roots: Int[Tensor, " B"], chains: Int[Tensor, "B W D"]) -> Draft:
    """The tree in which every chain is a path from the root: equal beginnings stand in it once.

    Nodes of the first chain come first, then what the second adds, and so on. So siblings hold distinct tokens, in the
    order of the chains. Waits for the device once, to leave out what no row needs.
    """
    count, depth = chains.shape[1:]
    index = torch.arange(count, device=chains.device)
    same = (chains[:, :, None] == chains[:, None]).long().cumprod(-1).bool()  # [B, W, W, D]: equal up to here
    owner = torch.where(same, index[:, None], count).amin(2)  # the first chain that has this node
    live = (owner == index[:, None]).flatten(1)
    above = 1 + owner[..., :-1] * depth + torch.arange(depth - 1, device=chains.device)
    parents = torch.cat([torch.zeros_like(owner[..., :1]), above], dim=2).flatten(1)
    live = torch.nn.functional.pad(live, (1, 0), value=True)
    parents = torch.nn.functional.pad(parents, (1, 0))
    order = (~live).long().argsort(dim=1, stable=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    live = live.gather(1, order)
    tokens = torch.cat([roots[:, None], chains.flatten(1)], dim=1).gather(1, order)
    parents = torch.where(live, rank.gather(1, parents).gather(1, order), 0)
    return Draft(tokens, "delta", parents=parents, live=live).narrow(int(live.sum(1).max()))
