"""Faults between the parts of a recipe, and between them and its target, found before any weight is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from dflash_lightning.data.read.process import Processing
from dflash_lightning.layer_ids import check_layer_ids
from dflash_lightning.model.start import DraftPlan
from dflash_lightning.recipe.faults import Fault, fault_of
from dflash_lightning.recipe.make import make
from dflash_lightning.recipe.nodes import faults_of
from dflash_lightning.recipe.prefetch import prefetch_part_faults
from dflash_lightning.recipe.served import (
    greet_servers,
    is_usual,
    layer_states,
    served_part_faults,
    served_target_faults,
)
from dflash_lightning.recipe.tree import holds_unknown, mapping_at, select
from dflash_lightning.target.preview import TargetPreview, preview
from dflash_lightning.target.room import most_new_tokens
from dflash_lightning.training.requirements import (
    check_accumulation,
    check_signals,
    check_slots,
    check_tallies,
    check_teacher,
)
from dflash_lightning.types import Alignment

_PARTS = ("block", "conditioning", "drafter", "head")


def part_faults(tree: dict[str, Any]) -> Iterator[Fault]:
    """Parts that do not go together, whatever the target is. ``tree`` holds values without faults of their own."""
    plan = _plan(tree)
    if plan is None:
        return
    yield from faults_of(plan.check_parts, "block")
    yield from served_part_faults(tree, plan)
    yield from prefetch_part_faults(tree, carries=plan.conditioning.carries)
    terms = {name: make(node) for name, node in mapping_at(tree, "loss").items()}
    yield from faults_of(partial(check_signals, terms, plan.head), "loss")
    yield from faults_of(partial(check_slots, terms, plan.block), "loss")
    products = mapping_at(tree, "data").get("feature_products")
    yield from faults_of(partial(check_teacher, terms, products), "data")
    accumulated = mapping_at(tree, "trainer").get("accumulate_grad_batches")
    if isinstance(accumulated, int):
        yield from faults_of(partial(check_accumulation, plan.conditioning, accumulated), "trainer")
        yield from faults_of(partial(check_tallies, terms, accumulated), "trainer")


def target_faults(tree: dict[str, Any], *, local: bool = True) -> Iterator[Fault]:
    """Layers, vocabulary, positions and geometry that the target does not have; none where it cannot be read yet.

    ``tree`` holds plain values, and its parts have no faults of their own. ``local`` asks the hub for nothing.
    """
    plan = _plan(tree)
    try:
        found = None if plan is None else preview_of(tree, local=local)
    except ValueError as error:
        yield fault_of(error, "target.source")
        return
    if plan is None or found is None:
        return
    yield from _fit_faults(plan, found, layer_states(tree, found))
    yield from _length_faults(tree, plan, found)
    yield from _cache_faults(mapping_at(tree, "data", "cache_also").get("layer_ids"), found)
    yield from served_target_faults(tree, plan, found)


def preview_of(tree: dict[str, Any], *, local: bool) -> TargetPreview | None:
    """The target of a recipe as far as its configuration tells; null where that cannot be read.

    Raises:
        ValueError: nothing is there, or the family cannot be a target.
    """
    node = mapping_at(tree, "target")
    if holds_unknown(node) or not is_usual(node):
        return None
    known = {key: node[key] for key in ("revision", "trust_remote_code") if key in node}
    return preview(node["source"], **known, local=local)


def greet(tree: dict[str, Any]) -> None:
    """Ask the servers of a recipe, if it names any, for a few tokens; see ``greet_servers``."""
    greet_servers(tree, _plan(tree), preview_of(tree, local=False))


def _plan(tree: dict[str, Any]) -> DraftPlan | None:
    """The drafter that a recipe describes; null where some of its parts are open."""
    if holds_unknown([tree.get(part) for part in (*_PARTS, "loss", "init_from")]):
        return None
    made: dict[str, Any] = {part: make(tree[part]) for part in _PARTS}
    made |= {key: tree.get(key) for key in ("draft_vocabulary", "init_from")}
    return DraftPlan(**made)


def _fit_faults(
    plan: DraftPlan, found: TargetPreview, layer_state: Callable[[int], Mapping[str, Tensor]]
) -> Iterator[Fault]:
    seen: set[str] = set()
    for check in plan.checks(found.facts, layer_state):
        for fault in faults_of(check, "target"):
            if fault.where not in seen:
                seen.add(fault.where)
                yield fault


def _cache_faults(layer_ids: Any, found: TargetPreview) -> Iterator[Fault]:
    """Layers that a cache of features is to hold beyond what the drafter reads."""
    if layer_ids:
        where = "data.cache_also.layer_ids"
        for fault in faults_of(
            partial(check_layer_ids, layer_ids, found.facts.num_layers, name=found.facts.name), where
        ):
            yield Fault(where, fault.what, f"Name layers from 0 to {found.facts.num_layers - 1}, each once")


def _length_faults(tree: dict[str, Any], plan: DraftPlan, found: TargetPreview) -> Iterator[Fault]:
    length = mapping_at(tree, "data").get("max_length")
    if isinstance(length, int):
        processing = Processing(length, "right", "all_turns", {}, 0)
        yield from faults_of(partial(processing.check_target, found.text), "data.max_length")
    positions, block = found.facts.max_positions, plan.block
    drafts = Alignment(block.largest_size, 0, block.label_layout).num_drafts
    most = most_new_tokens(1, positions, drafts)  # behind the shortest prompt
    for pattern in ("decoding.max_new_tokens", "callbacks.*.decoding.max_new_tokens"):
        for where, answer in select(tree, pattern):
            if isinstance(answer, int) and answer > most:
                what = f"{answer} leaves no position for a prompt: {found.facts.name} has {positions}"
                yield Fault(where, what, f"Use {most} or less, and much less for long prompts")
                return  # the callbacks' is most often the same one
