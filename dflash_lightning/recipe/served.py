"""Recipes whose features come from servers: what they cannot have, and whether the target's layers are loaded.

Where servers compute the features, a training run needs of the target its embedding, final norm and language head. So
its layers are not read, unless ``target.layers`` is true: then the servers are compared with them, and callbacks may
decode with the whole target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from dflash_lightning.data.features.servers import Servers
from dflash_lightning.model.start import DraftPlan
from dflash_lightning.recipe.evaluation import decoding_callbacks
from dflash_lightning.recipe.faults import Fault
from dflash_lightning.recipe.make import locate, make
from dflash_lightning.recipe.nodes import faults_of
from dflash_lightning.recipe.tree import UNKNOWN, holds_unknown, mapping_at
from dflash_lightning.target import load_target
from dflash_lightning.target.absent import no_layers
from dflash_lightning.target.preview import TargetPreview
from dflash_lightning.types import FeatureSpec

_LOADED_BY = f"{load_target.__module__}.{load_target.__name__}"
_LAYERS = "target.layers"
_INSTEAD = "Set target.layers=true, which loads the whole target beside the drafter"


def loads_layers(tree: dict[str, Any]) -> bool:
    """Whether a training run reads the weights of the target's layers; another loader than ours reads what it does."""
    node = mapping_at(tree, "target")
    return not mapping_at(tree, "data", "features") or node.get("layers") is True or not is_usual(node)


def is_usual(node: dict[str, Any]) -> bool:
    """Whether the target is loaded by ``load_target``, from its own configuration."""
    try:
        function = locate(node.get("_target_"))
    except ValueError:
        return False
    path = f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', '')}"
    return path == _LOADED_BY and isinstance(node.get("source"), str)


def without_faulty(tree: dict[str, Any], faults: Iterable[Fault]) -> dict[str, Any]:
    """The recipe with its servers' addresses open where something is wrong with their settings: none can be made."""
    node = mapping_at(tree, "data", "features")
    if not node or not any(f"{fault.where}.".startswith("data.features.") for fault in faults):
        return tree
    return {**tree, "data": {**tree["data"], "features": {**node, "endpoints": UNKNOWN}}}


def served_part_faults(tree: dict[str, Any], plan: DraftPlan) -> Iterator[Fault]:
    """Parts and callbacks that go without servers only, or without the target's layers only."""
    served = bool(mapping_at(tree, "data", "features"))
    if not served and mapping_at(tree, "target").get("layers") is False:
        yield Fault(_LAYERS, "false, but the target computes the features", "Use null, or data=served")
    if not served:
        return
    if plan.conditioning.carries:
        what = f"conditioning {plan.conditioning.name!r} plays rounds, in which the target reads every text here"
        yield Fault("data.features", what, "Use data.features=null, or another conditioning")
    if loads_layers(tree):
        return
    if plan.runs_layers:
        what = f"drafter {plan.drafter.name!r} runs layers of the target, which are not loaded where servers have them"
        yield Fault("drafter", what, f"{_INSTEAD}, or use another drafter")
    for name in decoding_callbacks(mapping_at(tree, "callbacks")):
        what = "it needs the whole target, whose layers are not loaded where servers compute its features"
        do = "or train with callbacks=[checkpoint_last] and run dflash evaluate on the run where the target fits"
        yield Fault(f"callbacks.{name}", what, f"{_INSTEAD}, {do}")


def layer_states(tree: dict[str, Any], found: TargetPreview) -> Callable[[int], Mapping[str, Tensor]]:
    """Names and shapes of the weights that a drafter may start from, or a refusal where they will not be there."""
    if loads_layers(tree):
        return found.decoder_layer_state

    def refuse(i: int) -> Mapping[str, Tensor]:
        raise no_layers(found.facts.name, f"the drafter starts from layer {i} (drafter.init_from_target or the like)")

    return refuse


def served_target_faults(tree: dict[str, Any], plan: DraftPlan, found: TargetPreview) -> Iterator[Fault]:
    """Features that the servers do not give."""
    if (servers := servers_of(tree)) is not None and (spec := spec_of(tree, plan, found)) is not None:
        yield from faults_of(partial(servers.given, spec, found.facts.num_layers), "data.features")


def servers_of(tree: dict[str, Any]) -> Servers | None:
    """The servers that a recipe names; null where it names none, or not yet."""
    node = mapping_at(tree, "data", "features")
    return None if not node or holds_unknown(node) else make(node)


def spec_of(tree: dict[str, Any], plan: DraftPlan, found: TargetPreview) -> FeatureSpec | None:
    """Features that drafter and losses read; null where that is not known yet."""
    try:
        spec = plan.required(found.facts)
    except ValueError:
        return None  # a fault of its own, said by the checks of the parts
    if spec is None:
        return None
    for node in mapping_at(tree, "loss").values():
        spec = spec | make(node).required()
    also = mapping_at(tree, "data", "cache_also")
    return spec | FeatureSpec(tuple(also.get("layer_ids") or ()), bool(also.get("last_hidden")))


def greet_servers(tree: dict[str, Any], plan: DraftPlan | None, found: TargetPreview | None) -> None:
    """Ask every server for the states of a few tokens, before weights are loaded.

    Raises:
        ValueError: one cannot be reached, or its answer is not as this recipe needs it.
    """
    servers = servers_of(tree)
    if servers is None:
        return
    max_length = mapping_at(tree, "data").get("max_length")
    if found is None or not isinstance(max_length, int):
        servers.names()
        return
    spec, facts = None if plan is None else spec_of(tree, plan, found), found.facts
    servers.greet(
        max_length=max_length,
        vocab_size=facts.vocab_size,
        max_positions=facts.max_positions,
        given=None if spec is None else servers.given(spec, facts.num_layers),
        width=facts.hidden_size,
    )
