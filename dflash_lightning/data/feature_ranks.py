"""How the processes of a run make features on disk together."""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch import Trainer

from dflash_lightning.data.feature_cache import FeatureCache
from dflash_lightning.data.feature_shards import FeatureShards


def make_on_disk(shards: FeatureShards, trainer: Trainer | None, *, say: Callable[[str], None]) -> FeatureCache:
    """Every rank makes its share; where machines have disks of their own, the ranks of each make the rest there.

    All ranks look for room before any of them writes, so that they agree on whether there is enough.

    Raises:
        ValueError: there is not enough room, on any rank.
    """
    say(shards.estimate())
    shards.check_room()
    if trainer is None:
        shards.build(progress=True)
        return shards.open()
    trainer.strategy.barrier("features: every rank has looked for room")
    shards.build(rank=trainer.global_rank, world=trainer.world_size, progress=trainer.is_global_zero)
    trainer.strategy.barrier("features: every rank has made its share")
    if trainer.num_nodes > 1:
        shards.build_missing(rank=trainer.local_rank, world=trainer.num_devices)
        trainer.strategy.barrier("features: every machine has all")
    return shards.open()
