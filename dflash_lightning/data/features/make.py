"""Where features come from that the data module gathers: one of the caches, or servers for every batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer

from dflash_lightning.data.features.cache import FeatureCache, Storage, make_in_memory
from dflash_lightning.data.features.products import with_products
from dflash_lightning.data.features.ranks import Ranks, make_on_disk
from dflash_lightning.data.features.served import FetchedFeatures, ServedFeatures
from dflash_lightning.data.features.servers import Servers
from dflash_lightning.data.features.shards import FeatureShards
from dflash_lightning.data.read.store import DocumentStore
from dflash_lightning.data.settings import FeatureProducts
from dflash_lightning.target import FrozenTarget
from dflash_lightning.target.parallel import check_whole
from dflash_lightning.types import FeatureSpec


def spec_of(cache_also: Mapping[str, Any] | None) -> FeatureSpec:
    """What ``data.cache_also`` names."""
    also = cache_also or {}
    return FeatureSpec(tuple(sorted({*(also.get("layer_ids") or ())})), bool(also.get("last_hidden")))


@dataclass(frozen=True)
class FeatureSettings:
    """Who computes features, and where they are kept (see ``DraftData``).

    ``kept`` null keeps nothing, ``servers`` null leaves it to the target. ``also`` is kept besides what is asked for.
    """

    kept: Literal["ram", "disk"] | None
    dtype: torch.dtype
    products: FeatureProducts
    also: FeatureSpec
    folder: str | None
    servers: Servers | None

    @property
    def gathered(self) -> bool:
        """Whether batches gather features, rather than having the target compute them on the device."""
        return self.kept is not None or self.servers is not None

    def make(
        self,
        store: DocumentStore,
        target: FrozenTarget,
        asked: FeatureSpec,
        trainer: Trainer | None,
        *,
        row_tokens: int | None,
        say: Callable[[str], None],
    ) -> FeatureCache:
        """What gathers the features ``asked`` of the documents in ``store``; kept ones are computed now.

        ``row_tokens`` null takes documents one by one.

        Raises:
            ValueError: there is no room for them, or servers do not give what they should.
        """
        check_whole(target.cut, "data.cache_features", "every rank makes features of its own", "Set it to null")
        spec, ranks = asked | self.also, Ranks.of(trainer)
        if trainer is not None:  # loaders are made before the module's fit starts
            target = target.to(trainer.strategy.root_device)
        served = self.open_servers(target, spec)
        if served is not None:
            say(served.line(store))
            row_tokens = None
            if self.kept is None:
                return FetchedFeatures(store, Storage.of(target, spec, target.dtype), served).ask(asked)
        else:
            own, target = target, with_products(target, self.products, exact=spec.last_hidden)
            row_tokens = row_tokens if target is own else None
        if self.kept == "ram":
            return make_in_memory(
                store,
                target,
                spec,
                row_tokens=row_tokens,
                dtype=self.dtype,
                say=say,
                progress=ranks.rank == 0,
                read=None if served is None else served.read,
            ).ask(asked)
        shards = FeatureShards(
            store, target, spec, row_tokens=row_tokens, dtype=self.dtype, root=self.folder, served=served
        )
        found = make_on_disk(shards, ranks, say=say).ask(asked)
        if served is not None:
            served.check_kept(store, found)
        return found

    def open_servers(self, target: FrozenTarget, spec: FeatureSpec) -> ServedFeatures | None:
        """Servers that were compared with the target, or with one another; null where the target computes.

        Raises:
            ValueError: one of them does not give what it should.
        """
        if self.servers is None:
            return None
        served = ServedFeatures(self.servers, target, spec)
        served.check()
        return served
