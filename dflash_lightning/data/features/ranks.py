"""How the processes of a run make features on disk together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning.pytorch import Trainer

from dflash_lightning.data.features.cache import FeatureCache
from dflash_lightning.data.features.shards import FeatureShards


def _alone(name: str) -> None:
    """The barrier of a single process."""


@dataclass(frozen=True)
class Ranks:
    """Which process of a run this is; ``barrier`` returns when all of them have called it."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    barrier: Callable[[str], None] = _alone

    @classmethod
    def of(cls, trainer: Trainer | None) -> Ranks:
        """The ranks of ``trainer``; null is a single process."""
        if trainer is None:
            return cls()
        world, local = trainer.world_size, trainer.world_size // trainer.num_nodes
        return cls(trainer.global_rank, world, trainer.local_rank, local, trainer.strategy.barrier)


def make_on_disk(shards: FeatureShards, ranks: Ranks, *, say: Callable[[str], None]) -> FeatureCache:
    """Every rank makes its share; where machines have disks of their own, the ranks of each make the rest there.

    All ranks look for room before any of them writes, so that they agree on whether there is enough.

    Raises:
        ValueError: there is not enough room, on any rank.
    """
    say(shards.estimate())
    shards.check_room()
    ranks.barrier("features: every rank has looked for room")
    shards.build(rank=ranks.rank, world=ranks.world, progress=ranks.rank == 0)
    ranks.barrier("features: every rank has made its share")
    if ranks.world > ranks.local_world:
        shards.build_missing(rank=ranks.local_rank, world=ranks.local_world)
        ranks.barrier("features: every machine has all")
    return shards.open()
