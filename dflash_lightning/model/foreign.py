"""Drafters that other programs saved: which program, what its settings mean here, and which are refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_lightning.draft_config import FIELDS, NESTED, DraftConfig, lift_settings
from dflash_lightning.layer_ids import spaced_layer_ids
from dflash_lightning.model.foreign_parts import (
    KEYS,
    MARKOV,
    PROJECTOR,
    PURE,
    REFINER,
    SHIFT,
    TENSORS,
    VARIANT,
    parts_of,
)

# Settings that belong to a method, in files that do not say that they are of it.
_SETTINGS_OF = {
    PROJECTOR: "{}",
    SHIFT: "Domino",
    PURE: "Domino",
    "markov_rank": "DSpark",
}
_RUN = ("dflash", "lilicorr", "domino", "dspark")  # values of ``projector_type``
# What a nested block may hold besides the fields of ``DraftConfig``; the functions below read it.
_NESTED_TOO = {"causal", "input_embedding_scale", "output_multiplier", "final_logit_softcapping", *_SETTINGS_OF, *KEYS}
# Tensors of parts that are known here, by which it shows that a file's settings are silent about them.
_PARTS_OF = {
    "candidate_selector.": "DFlash 2",
    "attention_conv.": "DFlash 2",
    "mlp_conv.": "DFlash 2",
    "lilicorr.": "LiLiCorr",
    "prefix_gru.": "Domino",
    "embed_proj.": "Domino",
    "markov_head.": "DSpark",
    "confidence_head.": "DSpark",
    "refiner_head.": "xPress",
}
_FIELDS = FIELDS - {"components", "target"}
_SPECIAL = {"bos_token_id", "eos_token_id", "pad_token_id"}


@dataclass(frozen=True)
class ForeignFormat:
    """How one program's files differ from ours. Where nothing is said, names are z-lab's.

    ``renamed`` maps how a tensor's name begins in the file to how z-lab's begins; ``copies`` are the target's own
    weights, which come along and are compared instead of loaded; ``maps_vocabulary`` says that a reduced vocabulary is
    stored as ``d2t`` (what to add to a draft id to get the target's) and ``t2d`` (whether a target id is one of them).
    """

    name: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    copies: tuple[str, ...] = ()
    maps_vocabulary: bool = False


OURS = ForeignFormat("dflash_lightning")
# z-lab's module keeps the codebooks as embeddings; its released files name them without ``.weight``, or with it.
_CODEBOOKS = tuple(f"candidate_selector.{side}_codebook" for side in ("predecessor", "successor"))
ZLAB = ForeignFormat(  # SpecForge's too, which has the heads
    "z-lab", renamed={f"{name}.weight": name for name in _CODEBOOKS} | TENSORS["prefix"] | TENSORS["markov"]
)
SPECULATORS = ForeignFormat(
    "speculators",
    renamed=TENSORS["refiner"] | TENSORS["markov"],
    copies=("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"),
    maps_vocabulary=True,
)
TRANSFORMERS = ForeignFormat("transformers", renamed={"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."})


def source_of(raw: Mapping[str, Any]) -> ForeignFormat:
    """Which program wrote this ``config.json``."""
    if raw.get("model_type") == DraftConfig.model_type:
        return OURS
    if "speculators_model_type" in raw:
        return SPECULATORS
    return TRANSFORMERS if raw.get("model_type") == "muse_glimmer_assistant" else ZLAB


def adopt_settings(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Settings of another program's ``config.json`` as ours, with the parts that its weights belong to.

    Raises:
        ValueError: the file is no drafter's, is one of a method not supported here, or leaves open what it computes.
    """
    source = source_of(raw)
    settings = _of_speculators(raw, where) if source is SPECULATORS else lift_settings(raw, where)
    _refuse_methods(raw, settings, where)
    if settings.get("target_layer_ids") is None:
        raise ValueError(_no_layer_ids(settings, where))
    _refuse_other_layer_ids(raw, settings["target_layer_ids"], where)
    _refuse_last_layer(settings, where)
    _warn_unknown(raw)
    if source is ZLAB and settings.get(PROJECTOR) in ("domino", "dspark"):  # SpecForge's DSpark has no other blocks
        shifted = settings.get(SHIFT) or settings[PROJECTOR] == "dspark"
        settings["label_layout"] = "anchor_first" if shifted else "same_position"
    kept = {key: value for key, value in settings.items() if key in _FIELDS | _SPECIAL and value is not None}
    if source is not ZLAB:  # a format that has no field for it
        kept.setdefault("num_target_layers", None)
    if source is TRANSFORMERS:
        kept |= {"vocab_size": None, "is_causal": False}
    kept |= _causality(raw, kept.get("is_causal"), where)
    if "Qwen3DFlashDraftModel" in (raw.get("architectures") or ()):  # NeMo's: bidirectional, whatever the layer type
        kept.setdefault("is_causal", False)
    kept.setdefault("target_hidden_size", kept.get("hidden_size", 0))
    if "num_key_value_heads" in settings:  # null: as many as there are heads, as transformers has it
        kept.setdefault("num_key_value_heads", kept.get("num_attention_heads", 0))
    if "head_dim" not in kept:  # any other size does not fit the tensors
        kept["head_dim"] = 128 if settings.get("model_type") == "qwen3" else _divided(kept)
    stated = settings.get("target")  # exports of ours say which target they are for
    kept["target"] = (dict(stated) if isinstance(stated, Mapping) else {}) | _logit_settings(settings, where)
    return {**kept, **_windows(settings, source, where), "components": _components(kept, settings, where)}


def _components(settings: Mapping[str, Any], stated: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The parts that a supported drafter of another program is made of; ``stated`` is all that its file says."""
    ids = settings["target_layer_ids"]
    conditioning = {"name": "kv_injection", "settings": {"target_layer_ids": ids, "num_features": len(ids)}}
    return {"conditioning": conditioning, **parts_of(stated, where)}


def explain_tensors(names: Iterable[str]) -> str:
    """A sentence that names the methods to which unexpected tensors belong; empty where none is known."""
    names = list(names)
    found = sorted({method for name in names for part, method in _PARTS_OF.items() if part in name})
    return f"They belong to a drafter of {' and '.join(found)}, of which the settings say nothing. " if found else ""


def _refuse_methods(raw: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> None:
    kind, own = raw.get("speculators_model_type", "dflash"), settings.get(PROJECTOR)
    found = [] if kind in ("dflash", "xpress", "dspark") else [(f"speculators_model_type={kind!r}", kind)]
    for key, method in _SETTINGS_OF.items():
        value = settings.get(key)
        if value and value not in _RUN and own != method.lower():
            found.append((f"{key}={value!r}", method.format(value)))
    if found:
        stated, method = found[0]
        raise ValueError(
            f"{where}: this is a drafter of {method} (config.json states {stated}) in a layout that is not supported; "
            "only DFlash's plain drafter, DFlash 2, LiLiCorr, SpecForge's Domino and DSpark, and speculators' DSpark "
            "and xPress are. Nothing was loaded."
        )


def _no_layer_ids(settings: Mapping[str, Any], where: str) -> str:
    layers, depth = settings.get("num_hidden_layers"), settings.get("num_target_layers")
    advice = "Give a saved drafter's folder."
    default = spaced_layer_ids(depth, layers) if layers and depth else []
    # A target of few layers gets ids that no drafter can have; then nothing is advised.
    if default and default == sorted({*default}) and min(default) >= 0 and settings.get("model_type") == "qwen3":
        advice = (
            f"Where they were left to z-lab's default, write {default} into config.json; "
            f"otherwise give a saved drafter's folder."
        )
    return (
        f"{where}: config.json states no target_layer_ids, at the top level or in {NESTED!r}, so it is no drafter "
        f"known here (model_type {settings.get('model_type')!r}). {advice}"
    )


def _refuse_other_layer_ids(raw: Mapping[str, Any], ids: Sequence[int], where: str) -> None:
    """vLLM's own spelling counts states, so its ids are 1 more, and vLLM prefers it to the other one."""
    for name in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"):
        for place, block in (("", raw), (f"{NESTED}.", raw.get(NESTED) or {})):
            states = block.get(name)
            if states is not None and list(states) != [i + 1 for i in ids]:
                raise ValueError(
                    f"{where}: config.json states target_layer_ids={list(ids)} and {place}{name}={states}. The latter "
                    f"counts from the embedding's output, so it should be {[i + 1 for i in ids]}: programs would read "
                    "different layers. Correct the wrong one. Nothing was loaded."
                )


def _refuse_last_layer(settings: Mapping[str, Any], where: str) -> None:
    """The one layer whose output programs take differently; files of ours are known by their target's digest."""
    ids, depth = settings["target_layer_ids"], settings.get("num_target_layers")
    if type(depth) is int and depth - 1 in ids and "digest" not in (settings.get("target") or ()):
        raise ValueError(
            f"{where}: target_layer_ids {ids} names the target's last layer ({depth - 1}). z-lab's package and "
            "transformers take its output after the final norm, others before it, so it is open what the drafter was "
            "trained on. Nothing was loaded."
        )


def _warn_unknown(raw: Mapping[str, Any]) -> None:
    unknown = {key: value for key, value in (raw.get(NESTED) or {}).items() if key not in _FIELDS | _NESTED_TOO}
    if unknown:
        warnings.warn(
            f"The drafter's config states {unknown} in {NESTED!r}, which means nothing here and is not used. "
            "Compare its drafts with those of the program that wrote it.",
            stacklevel=4,
        )


def _logit_settings(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What the file says of the target's embedding and logits; the target itself decides, and is compared with it."""
    scale = settings.get("input_embedding_scale")
    if scale not in (None, 1, 1.0):
        raise ValueError(
            f"{where}: input_embedding_scale {scale} is not supported; only 1.0 is, that is, a drafter that reads the "
            "target's embedding rows as they are stored. Nothing was loaded."
        )
    stated = {
        "logit_scale": settings.get("output_multiplier"),
        "logit_softcap": settings.get("final_logit_softcapping"),
    }
    return {key: value for key, value in stated.items() if value is not None}


def _causality(raw: Mapping[str, Any], is_causal: bool | None, where: str) -> dict[str, Any]:
    """``is_causal``, which vLLM's exporters write as ``causal`` into the nested block."""
    nested = (raw.get(NESTED) or {}).get("causal")
    if nested is None:
        return {} if is_causal is None else {"is_causal": is_causal}
    if is_causal is not None and is_causal != nested:
        raise ValueError(
            f"{where}: config.json states is_causal={is_causal} and {NESTED}.causal={nested}. Make the two agree."
        )
    return {"is_causal": nested}


def _windows(settings: Mapping[str, Any], source: ForeignFormat, where: str) -> dict[str, Any]:
    """``layer_types`` and ``sliding_window``; no window where no layer slides."""
    types, window = settings.get("layer_types"), settings.get("sliding_window")
    # Qwen3's config class, which z-lab's, SpecForge's, NeMo's and speculators' drafters are read with, drops the window
    # unless use_sliding_window is true: a file without it was never run with the window that it states.
    switched_on = bool(settings.get("use_sliding_window")) or source is TRANSFORMERS
    if types is None and switched_on and window is not None:
        raise ValueError(
            f"{where}: config.json states sliding_window={window} and use_sliding_window=true, but no layer_types, so "
            "it is open which layers slide. Write layer_types, one entry per layer."
        )
    sliding = "sliding_attention" in (types or ())
    if sliding and not switched_on:
        raise ValueError(
            f"{where}: layer_types has sliding layers, but use_sliding_window is "
            f"{settings.get('use_sliding_window')} (sliding_window={window}), with which Qwen3's config has no "
            "window. Write use_sliding_window=true if the drafter was trained with the window."
        )
    return {"layer_types": types, "sliding_window": window if sliding else None}


def _of_speculators(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of a speculators file in z-lab's names; its layer ids count from the embedding, so 1 less here."""
    layers = raw.get("transformer_layer_config") or {}
    settings = lift_settings(layers, where)
    for key in ("block_size", "mask_token_id", "target_hidden_size", "draft_vocab_size"):
        if None not in (settings.get(key), raw.get(key)) and settings[key] != raw[key]:
            raise ValueError(
                f"{where}: config.json states {key}={raw[key]} and transformer_layer_config.{key}="
                f"{settings[key]}. Make the two agree."
            )
        settings[key] = raw.get(key)
    ids = raw.get("aux_hidden_state_layer_ids")
    if ids is not None and min(ids, default=1) < 1:
        raise ValueError(
            f"{where}: aux_hidden_state_layer_ids {ids} names the embedding's output (0), which no drafter here reads; "
            "1 is the output of the first layer in that format."
        )
    settings["target_layer_ids"] = None if ids is None else [i - 1 for i in ids]
    if settings.get("vocab_size") == settings["draft_vocab_size"]:
        settings["draft_vocab_size"] = None
    if "sliding_attention" in (layers.get("layer_types") or ()):
        raise ValueError(
            f"{where}: transformer_layer_config.layer_types has sliding layers, whose window speculators counts from "
            "the block's anchor and drafters here from each slot's own position. Nothing was loaded."
        )
    if settings.get("is_causal"):
        raise ValueError(
            f"{where}: transformer_layer_config.is_causal is true, but full layers are never causal in speculators, so "
            "it is open how the drafter was trained. Write is_causal=null where speculators trained it."
        )
    settings["is_causal"] = None
    settings["num_target_layers"] = raw.get("num_target_layers")
    dspark = raw["speculators_model_type"] == "dspark"
    settings["label_layout"] = "anchor_first" if raw.get("sample_from_anchor", dspark) else "same_position"
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    named = {"name": verifier["name_or_path"]} if verifier.get("name_or_path") else {}
    settings["target"] = {**named, **(raw.get("target") or {})}
    settings["chat_template_kwargs"] = raw.get("chat_template_kwargs")
    settings |= {key: raw[key] for key in (*REFINER, "architectures") if key in raw}
    if dspark:
        silent = {"markov_rank": 256, "enable_confidence_head": True, "confidence_head_with_markov": True}
        stated = {key: raw[key] for key in (*MARKOV, VARIANT) if raw.get(key) is not None}
        settings |= {PROJECTOR: "dspark", **silent, **stated}
    return settings


def _divided(settings: Mapping[str, Any]) -> int:
    heads = settings.get("num_attention_heads")
    return settings.get("hidden_size", 0) // heads if heads else 0
