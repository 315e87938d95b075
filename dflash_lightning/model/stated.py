"""What kind of value each setting of a drafter's ``config.json`` is, whichever program wrote it and wherever it stands.

Ranges are for others to check: here a value of another kind is refused before anything computes with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_lightning.draft_config import NESTED

_MOST = 2**31 - 1  # sizes and ids beyond are those of no model, and torch cannot count with them


@dataclass(frozen=True)
class _Kind:
    """Values that a setting may have besides null, in words and as a test."""

    words: str
    fits: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) <= _MOST


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


_WHOLE = _Kind("a whole number", _is_whole)
_NUMBER = _Kind("a finite number", _is_number)
_FLAG = _Kind("true or false", lambda value: type(value) is bool)
_TEXT = _Kind("text", lambda value: isinstance(value, str))
_NUMBERS = _Kind("a list of whole numbers", lambda value: isinstance(value, list) and all(map(_is_whole, value)))
_TEXTS = _Kind(
    "a list of text", lambda value: isinstance(value, list) and all(isinstance(entry, str) for entry in value)
)
_OBJECT = _Kind("an object of settings", lambda value: isinstance(value, dict))

_FLAT_ROPE = {"rope_theta": _NUMBER, "partial_rotary_factor": _NUMBER}
_ROPE = {**_FLAT_ROPE, "rope_type": _TEXT, "type": _TEXT}
_BLOCKS = ("rope_parameters", "rope_scaling")
# Of settings that stand at the top, in ``dflash_config`` or in speculators' ``transformer_layer_config``.
_KINDS: dict[str, _Kind] = {
    **_FLAT_ROPE,
    **dict.fromkeys(
        (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "sliding_window",
            "vocab_size",
            "draft_vocab_size",
            "block_size",
            "mask_token_id",
            "num_target_layers",
            "target_hidden_size",
        ),
        _WHOLE,
    ),
    **dict.fromkeys(("rms_norm_eps", "input_embedding_scale", "output_multiplier", "final_logit_softcapping"), _NUMBER),
    "confidence_head_alpha": _NUMBER,
    "pure_draft_prefix_len": _WHOLE,
    **dict.fromkeys(("target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"), _NUMBERS),
    **dict.fromkeys(("layer_types", "architectures"), _TEXTS),
    **dict.fromkeys(("hidden_act", "label_layout", "model_type", "speculators_model_type"), _TEXT),
    **dict.fromkeys(("projector_type", "markov_head_type"), _TEXT),
    **dict.fromkeys(("is_causal", "causal", "use_sliding_window", "sample_from_anchor"), _FLAG),
    **dict.fromkeys(("shift_label", "lilicorr_enabled"), _FLAG),
    **dict.fromkeys((*_BLOCKS, NESTED, "target", "components", "chat_template_kwargs"), _OBJECT),
    **dict.fromkeys(("transformer_layer_config", "speculators_config"), _OBJECT),
}
_TARGET = {
    **dict.fromkeys(("name", "revision", "digest", "model_type"), _TEXT),
    **dict.fromkeys(("embedding_scale", "logit_scale", "logit_softcap"), _NUMBER),
    "vocab_size": _WHOLE,
}
_PART = {"name": _TEXT, "settings": _OBJECT}


def check_kinds(raw: Mapping[str, Any], where: str) -> None:
    """Refuse settings whose values are of another kind than the setting is; null is always one.

    Raises:
        ValueError: lists them all, each with its place in the file and what it must be.
    """
    if wrong := list(_faults(raw)):
        raise ValueError(f"{where}: config.json: {'; '.join(wrong)}. Correct config.json. Nothing was loaded.")


def _faults(raw: Mapping[str, Any]) -> Iterator[str]:
    for place in ("", NESTED, "transformer_layer_config"):
        block = _object(raw, place) if place else raw
        yield from _of(block, _KINDS, place)
        for name in _BLOCKS:
            yield from _of(_object(block, name), _ROPE, _joined(place, name))
    yield from _of(_object(raw, "target"), _TARGET, "target")
    verifier = {"verifier": _OBJECT}
    speculators = _object(raw, "speculators_config")
    yield from _of(speculators, verifier, "speculators_config")
    yield from _of(_object(speculators, "verifier"), {"name_or_path": _TEXT}, "speculators_config.verifier")
    components = _object(raw, "components")
    for axis, part in components.items():
        if not isinstance(part, dict) or not {*_PART} <= {*part}:
            yield f"components.{axis} is {_short(part)}, but must be an object with a name and settings"
        else:
            yield from _of(part, _PART, f"components.{axis}")


def _of(block: Mapping[str, Any], kinds: Mapping[str, _Kind], place: str) -> Iterator[str]:
    for name, kind in kinds.items():
        value = block.get(name)
        if value is not None and not kind.fits(value):
            yield f"{_joined(place, name)} is {_short(value)}, but must be {kind.words}"


def _short(value: Any) -> str:
    return f"{value!r:.60}"


def _object(block: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object of settings ``name``; empty where none stands there, or something else."""
    found = block.get(name)
    return found if isinstance(found, dict) else {}


def _joined(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
