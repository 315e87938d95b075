"""Faults between how a recipe decodes and the drafter it trains."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dflash_lightning.acceptance.rule import AcceptanceRule
from dflash_lightning.block import BlockConstructor
from dflash_lightning.conditioning import Conditioning
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.drafter import Drafter, SequentialDrafter
from dflash_lightning.head import DraftHead
from dflash_lightning.recipe.evaluation import has_evaluation, is_expected
from dflash_lightning.recipe.faults import Fault, fault_of
from dflash_lightning.recipe.make import make
from dflash_lightning.recipe.nodes import faults_of
from dflash_lightning.recipe.tree import UNKNOWN, holds_unknown, mapping_at, select
from dflash_lightning.types import Alignment

PARTS = ("block", "conditioning", "drafter", "head")


@dataclass(frozen=True)
class _Trained:
    """The parts of the drafter that a recipe trains."""

    block: BlockConstructor
    conditioning: Conditioning
    drafter: Drafter
    head: DraftHead

    def alignment(self, block_size: int | None = None) -> Alignment:
        """Of blocks of ``block_size`` slots; null: of those that are trained."""
        own = Alignment(self.block.block_size, 0, self.block.label_layout)
        return own if block_size is None else replace(own, block_size=block_size)


def drafting_faults(tree: dict[str, Any], wrong: Collection[str]) -> Iterator[Fault]:
    """What is asked of the drafter, or of a callback that decodes, and it cannot give.

    ``tree`` holds plain values, and ``PARTS`` have no faults of their own. ``wrong`` are the groups that have: what
    they say of decoding is passed over.
    """
    if any(holds_unknown(tree.get(part)) for part in PARTS):
        return
    trained = _Trained(**{part: make(tree[part]) for part in PARTS})
    for where, settings in _settings(tree, wrong):
        for check in _checks(settings, trained, _decoding_so(tree, where, wrong)):
            for fault in faults_of(check, where):
                yield replace(fault, where=fault.where.replace("decoding", where, 1))
        yield from _slot_faults(settings, trained.block.block_size, where)
    if "measure" not in wrong:
        yield from _measure_faults(tree, trained)


def _measure_faults(tree: dict[str, Any], trained: _Trained) -> Iterator[Fault]:
    """Ways to decode that a bench measures once the drafter is trained, and it cannot be decoded by."""
    node = tree.get("measure")
    if not isinstance(node, dict) or holds_unknown(node):
        return
    try:
        for name, settings in make(node).ways(tree):
            for check in _checks(settings, trained, []):
                for fault in faults_of(check, "measure.decodings"):
                    yield Fault("measure.decodings", f"{name}: {fault.what}", f"Leave {name} out")
    except ValueError as error:  # settings that cannot be made, such as a second drafter that is not named
        yield Fault("measure.decodings", fault_of(error, "measure").what, "Leave that one out")


def _settings(tree: dict[str, Any], wrong: Collection[str]) -> Iterator[tuple[str, DecodingSettings]]:
    """Every way to decode that a recipe states, by its key."""
    for pattern in ("decoding", "callbacks.*.decoding"):
        for where, node in select(tree, pattern):
            if where.partition(".")[0] in wrong or not isinstance(node, dict) or "_target_" not in node:
                continue
            if not holds_unknown(node) and isinstance(settings := make(node), DecodingSettings):
                yield where, settings


def _decoding_so(tree: dict[str, Any], where: str, wrong: Collection[str]) -> list[dict[str, Any]]:
    """The nodes of callbacks that decode by the settings at ``where``: their own, or the recipe's (``${decoding}``)."""
    if where != "decoding":
        return [mapping_at(tree, *where.split(".")[:-1])]
    nodes = mapping_at(tree, "callbacks").values() if "callbacks" not in wrong else ()
    return [node for node in nodes if isinstance(node, dict) and node.get("decoding") is UNKNOWN]


def _checks(
    settings: DecodingSettings, trained: _Trained, callbacks: list[dict[str, Any]]
) -> Iterator[Callable[[], object]]:
    """Calls that raise a ``ValueError`` of what does not go together; ``callbacks`` are the nodes that decode so."""
    head, sequential = trained.head, isinstance(trained.drafter, SequentialDrafter)
    yield from settings.checks(head, keeps_state=head.keeps_state or sequential, alignment=trained.alignment())
    if has_evaluation(callbacks):
        yield partial(settings.check_steady, "decoding")
    if any(map(is_expected, callbacks)):
        count = trained.alignment(settings.block_size).num_drafts
        yield partial(AcceptanceRule.of_parts, settings, head, trained.conditioning, count)


def _slot_faults(settings: DecodingSettings, trained: int, where: str) -> Iterator[Fault]:
    fed = settings.block_size
    if fed is not None and fed > trained and not settings.untrained_slots:
        what = f"{fed} slots, but blocks of {trained} are trained (block.block_size)"
        yield Fault(f"{where}.block_size", what, f"Use {trained} or fewer, null for all, or untrained_slots=true")
