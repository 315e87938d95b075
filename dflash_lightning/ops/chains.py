"""Chains of slots that are run one slot at a time: what a slot sees of its own chain, and of the context.

A chain is a training block or a lane of a draft. Step ``t`` runs slot ``t`` of every chain. It sees the context that
the chain's slot 0 sees, and slots ``0 .. t`` of its own chain. It sees nothing of another chain.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.ops.context import KVSource

Chain = tuple[Tensor, Tensor]  # keys and values [B, W, t, Hkv, D] of the t slots that each chain has run


def lengthen(
    chain: Chain | None, k: Float[Tensor, "B W Hkv D"], v: Float[Tensor, "B W Hkv D"]
) -> tuple[Float[Tensor, "B W t Hkv D"], Float[Tensor, "B W t Hkv D"]]:
    """The chain with one more slot; null is a chain that has run none. Nothing is changed in place."""
    if chain is None:
        return k[:, :, None], v[:, :, None]
    return torch.cat([chain[0], k[:, :, None]], dim=2), torch.cat([chain[1], v[:, :, None]], dim=2)


def visible_sources(sources: list[KVSource], chain: Chain | None, num_chains: int) -> list[KVSource]:
    """What the next slot of ``num_chains`` chains per row sees besides itself.

    Intervals of ``sources`` are per chain, or one per row for all its chains. Windows count from the slot's own row.
    """
    ran = 0 if chain is None else chain[0].shape[2]
    found = [_at_slot(source, ran, num_chains) for source in sources]
    return found if chain is None else [*found, own_source(*chain)]


def own_source(k: Float[Tensor, "B W t Hkv D"], v: Float[Tensor, "B W t Hkv D"]) -> KVSource:
    """The slots that every chain has run, chain after chain; chain ``n`` sees rows ``n t .. n t + t - 1``, its own."""
    batch, chains, ran = k.shape[:3]
    start = (torch.arange(chains, device=k.device) * ran).expand(batch, chains)
    return KVSource(k.flatten(1, 2), v.flatten(1, 2), start, start + ran, start + ran)


def _at_slot(source: KVSource, slot: int, num_chains: int) -> KVSource:
    def spread(x: Int[Tensor, "B n"]) -> Int[Tensor, "B W"]:
        return x.expand(-1, num_chains)

    # What attention keeps of the intervals belongs to whole blocks, whose slot 0 stands elsewhere.
    return replace(
        source,
        start=spread(source.start),
        end=spread(source.end),
        slot_row=spread(source.slot_row) + slot,
        masks=None,
    )
