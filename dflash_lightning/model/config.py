"""A drafter's configuration, made from a target and the parts of a recipe, and checked before there is any weight."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dflash_lightning.block.base import BlockConstructor
from dflash_lightning.component import Component
from dflash_lightning.conditioning import Conditioning
from dflash_lightning.draft_config import NESTED, DraftConfig
from dflash_lightning.drafter import Drafter, SequentialDrafter
from dflash_lightning.errors import SettingError
from dflash_lightning.geometry import SIZES
from dflash_lightning.head import DraftHead
from dflash_lightning.ops.rotary import check_rope
from dflash_lightning.target import check_layer_ids
from dflash_lightning.types import TargetFacts

_POSITIVE = ("block_size", *SIZES, "target_hidden_size")
_OF_TARGET = ("num_target_layers", "vocab_size")  # null: the file's format has no field for it


def make_draft_config(
    facts: TargetFacts,
    *,
    block: BlockConstructor,
    conditioning: Conditioning,
    drafter: Drafter,
    head: DraftHead,
    mask_token_id: int,
    draft_vocab_size: int | None = None,
) -> DraftConfig:
    """The configuration of a drafter for the target that ``facts`` describe, every null resolved and written out.

    The mask id is only checked against the embedding's rows here; ``target.check_mask_token_id`` knows the tokenizer.

    Raises:
        ValueError: a setting that does not fit this target, or parts that do not go together; the message says which,
            and what to do.
    """
    check_parts(block, conditioning, drafter, head)
    ids = conditioning.target_layer_ids
    if ids is None:
        ids = conditioning.default_layer_ids(facts.num_layers)
    check_layer_ids(ids, facts)
    geometry = drafter.geometry(facts)
    conditioning.check(facts, geometry)
    config = DraftConfig(
        **asdict(geometry),
        target_hidden_size=facts.hidden_size,
        num_target_layers=facts.num_layers,
        target_layer_ids=list(ids),
        vocab_size=facts.vocab_size,
        draft_vocab_size=draft_vocab_size,
        block_size=block.block_size,
        label_layout=block.label_layout,
        mask_token_id=mask_token_id,
        components={"conditioning": _describe(conditioning), "drafter": _describe(drafter), "head": _describe(head)},
        target=identify(facts),
    )
    check_config(config)
    return config


def check_parts(block: BlockConstructor, conditioning: Conditioning, drafter: Drafter, head: DraftHead) -> None:
    """Refuse parts that would train and draft badly together.

    Raises:
        ValueError: the conditioning does not offer what the drafter or the head reads, or hands over what the drafter
            does not take; it serves another number of draft layers; slots hold something else in training than in
            decoding; or the head wants a whole block of a drafter that runs slot by slot.
    """
    _check_slots(block, drafter, head)
    if conditioning.carries and isinstance(drafter, SequentialDrafter):
        raise SettingError(
            "conditioning",
            f"{conditioning.name!r} hands a block what the round before left, but drafter {drafter.name!r} drafts "
            "token by token and takes nothing of it",
            do="Use a drafter that runs a block at once, or another conditioning",
        )
    served = conditioning.draft_layers
    if served is not None and served != drafter.num_layers:
        raise SettingError(
            "drafter.num_layers",
            f"{drafter.num_layers} draft layers, but conditioning {conditioning.name!r} has something for each of "
            f"{served}",
            do="Set conditioning.num_features (or the number of target_layer_ids) to drafter.num_layers",
        )
    for axis, part in (("drafter", drafter), ("head", head)):
        missing = part.needs - conditioning.provides
        if missing:
            able = sorted(name for name, other in Conditioning.registry.items() if part.needs <= _provided(other))
            advice = f"Use one of {able}" if able else f"No conditioning does; use another {axis}"
            raise SettingError(
                "conditioning",
                f"{axis} {part.name!r} reads {sorted(missing)}, which {conditioning.name!r} does not provide",
                do=advice,
            )


def _check_slots(block: BlockConstructor, drafter: Drafter, head: DraftHead) -> None:
    if block.inputs != drafter.inputs:
        held = {"masks": "the root's token and masks", "tokens": "every token drafted so far"}
        advice = {
            "masks": "Set block.inputs=masks, or use a drafter that runs token by token",
            "tokens": "Use block=anchored block.inputs=tokens block.label_layout=anchor_first, or another drafter",
        }
        raise SettingError(
            "block.inputs",
            f"slots hold {block.inputs} in training, but in decoding drafter {drafter.name!r} is fed "
            f"{held[drafter.inputs]}",
            do=advice[drafter.inputs],
        )
    if isinstance(drafter, SequentialDrafter) and not head.per_slot:
        able = sorted(name for name, part in DraftHead.registry.items() if getattr(part, "per_slot", False))
        raise SettingError(
            "head",
            f"drafter {drafter.name!r} runs a block slot by slot, and head {head.name!r} reads more than one slot's "
            "hidden state",
            allowed=f"Use one of {able}, or a drafter that runs a block at once",
        )


def _provided(part: type[Component]) -> frozenset[str]:
    assert issubclass(part, Conditioning)
    return part.provides


def identify(facts: TargetFacts) -> dict[str, Any]:
    """``DraftConfig.target``: which model a drafter was made for; a null digest says that nobody knows its weights."""
    return {
        "name": facts.name,
        "revision": facts.revision,
        "digest": facts.digest or None,
        "model_type": facts.model_type,
        "vocab_size": facts.vocab_size,
        "embedding_scale": facts.embedding_scale,
    }


def check_config(config: DraftConfig) -> None:
    """Refuse a configuration from which no drafter can be built, by the name of the field at fault.

    Raises:
        ValueError: a field is missing or out of range.
    """
    _check_whole_numbers(config)
    missing = [name for name in _POSITIVE if not getattr(config, name)]
    missing += [name for name in _OF_TARGET if getattr(config, name) == 0]
    if not config.target_layer_ids and _taps_layers(config):
        missing.append("target_layer_ids")
    if config.mask_token_id < 0:
        missing.append("mask_token_id")
    if not (config.rope_parameters or {}).get("rope_theta"):
        missing.append("rope_theta")
    if missing:
        raise ValueError(
            f"The drafter's config states no {', '.join(missing)}. It must be in config.json, at the top level or in "
            f"{NESTED!r} (rope_theta: at the top level or in 'rope_parameters'); nothing is assumed in its place."
        )
    check_rope(config.rope_parameters or {}, where="rope_parameters")
    assert config.alignment  # refuses block size and label layout by itself
    if 0 < config.max_position_embeddings < config.block_size:
        raise SettingError(
            "block.block_size",
            f"{config.block_size} slots are more than the {config.max_position_embeddings} positions that there are",
            do="Use 16 or a number near it",
        )
    if config.hidden_size != config.target_hidden_size:
        raise SettingError(
            "hidden_size",
            f"the drafter's is {config.hidden_size}, the target's {config.target_hidden_size}",
            do="They must be equal, because the drafter uses the target's embedding and language head",
        )
    rows = config.vocab_size
    if rows is not None and config.mask_token_id >= rows:
        raise SettingError(
            "block.mask_token_id",
            f"{config.mask_token_id} is outside the target's embedding (rows 0..{rows - 1})",
            do="Leave it null to let an unused row be chosen",
        )
    depth = config.num_target_layers
    outside = [i for i in config.target_layer_ids if i < 0 or (depth is not None and i >= depth)]
    if outside:
        raise ValueError(
            f"target_layer_ids: {config.target_layer_ids} names {outside}, but the target has "
            f"{depth} decoder layers (0..{(depth or 0) - 1})."
        )
    if len({*config.target_layer_ids}) < len(config.target_layer_ids):
        raise SettingError(
            "target_layer_ids", f"{config.target_layer_ids} names a layer twice", do="Name each one once"
        )
    if config.draft_vocab_size is not None and not 0 < config.draft_vocab_size <= (rows or 0):
        raise SettingError(
            "draft_vocab_size",
            f"{config.draft_vocab_size} is not between 1 and the target's {rows} embedding rows",
            "Use null for the whole vocabulary",
        )
    config.geometry.check()


def _check_whole_numbers(config: DraftConfig) -> None:
    """Refuse sizes and ids of another kind, such as "4" or 4.0, and negative ones, by the name of the field."""
    stated = {
        name: getattr(config, name)
        for name in (*_POSITIVE, *_OF_TARGET, "mask_token_id", "sliding_window", "draft_vocab_size")
    }
    stated |= {f"target_layer_ids[{n}]": i for n, i in enumerate(config.target_layer_ids)}
    wrong = [f"{name} is {value!r}" for name, value in stated.items() if value is not None and type(value) is not int]
    wrong += [f"{name} is {stated[name]}" for name in _POSITIVE if type(stated[name]) is int and stated[name] < 0]
    if wrong:
        raise ValueError(f"The drafter's config: {', '.join(wrong)}, but must be a whole number. Correct config.json.")


def _taps_layers(config: DraftConfig) -> bool:
    """Whether the conditioning reads target layers; one that is not known here is refused where it is made."""
    known = Conditioning.registry.get(config.components.get("conditioning", {}).get("name", ""))
    return known is None or not issubclass(known, Conditioning) or known.taps_layers


def _describe(part: Component) -> dict[str, Any]:
    return {"name": part.name, "settings": part.settings()}
