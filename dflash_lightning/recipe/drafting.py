"""Faults between how a recipe decodes and the drafter it trains."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.choice import choose_strategies
from dflash_lightning.decoding.parts import check_signals
from dflash_lightning.recipe.faults import Fault
from dflash_lightning.recipe.make import make
from dflash_lightning.recipe.nodes import faults_of
from dflash_lightning.recipe.tree import holds_unknown, mapping_at, select


def drafting_faults(tree: dict[str, Any], wrong: Collection[str]) -> Iterator[Fault]:
    """A policy that reads a signal which the head does not give; more slots to draft with than are trained.

    ``tree`` holds plain values. ``wrong`` are the groups that have faults of their own: what they say of decoding is
    passed over.
    """
    if holds_unknown(tree.get("head")):
        return
    head, trained = make(tree["head"]), mapping_at(tree, "block").get("block_size")
    for pattern in ("decoding", "callbacks.*.decoding"):
        for where, node in select(tree, pattern):
            if (
                where.partition(".")[0] in wrong
                or not isinstance(node, dict)
                or "_target_" not in node
                or holds_unknown(node)
            ):
                continue
            settings = make(node)
            if not isinstance(settings, DecodingSettings):
                continue
            builder, verifier = choose_strategies(**settings.strategies, sampling=settings.sampling)
            check = partial(check_signals, settings.strategies["policy"], builder, head, verifier)
            for fault in faults_of(check, where):
                yield Fault(fault.where.replace("decoding", where, 1), fault.what, fault.do)
            fed = settings.block_size
            if fed is not None and isinstance(trained, int) and fed > trained and not settings.untrained_slots:
                what = f"{fed} slots, but blocks of {trained} are trained (block.block_size)"
                yield Fault(
                    f"{where}.block_size", what, f"Use {trained} or fewer, null for all, or untrained_slots=true"
                )
