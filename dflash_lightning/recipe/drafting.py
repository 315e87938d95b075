"""Faults between how a recipe decodes and the drafter it trains."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.choice import choose_strategies
from dflash_lightning.decoding.dual_proposer import check_pair
from dflash_lightning.decoding.parts import check_memory, check_signals
from dflash_lightning.drafter import SequentialDrafter
from dflash_lightning.recipe.faults import Fault
from dflash_lightning.recipe.make import make
from dflash_lightning.recipe.nodes import faults_of
from dflash_lightning.recipe.tree import holds_unknown, mapping_at, select
from dflash_lightning.types import Alignment


def drafting_faults(tree: dict[str, Any], wrong: Collection[str]) -> Iterator[Fault]:
    """A policy or builder that asks more of the head than it gives; more slots to draft with than are trained.

    And a second drafter that does not go with this one.

    ``tree`` holds plain values. ``wrong`` are the groups that have faults of their own: what they say of decoding is
    passed over.
    """
    if holds_unknown(tree.get("head")) or holds_unknown(tree.get("drafter")) or holds_unknown(tree.get("block")):
        return
    head, trained = make(tree["head"]), mapping_at(tree, "block").get("block_size")
    block, sequential = make(tree["block"]), isinstance(make(tree["drafter"]), SequentialDrafter)
    alignment = Alignment(block.block_size, 0, block.label_layout)
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
            fed = settings.block_size
            checks = [
                partial(check_signals, settings.strategies["policy"], builder, head, verifier),
                partial(check_memory, builder, head.keeps_state or sequential),
            ]
            if builder.second is not None:
                checks.append(partial(check_pair, builder.second, alignment, fed))
            for fault in (found for check in checks for found in faults_of(check, where)):
                yield Fault(fault.where.replace("decoding", where, 1), fault.what, fault.do)
            if fed is not None and isinstance(trained, int) and fed > trained and not settings.untrained_slots:
                what = f"{fed} slots, but blocks of {trained} are trained (block.block_size)"
                yield Fault(
                    f"{where}.block_size", what, f"Use {trained} or fewer, null for all, or untrained_slots=true"
                )
