"""The layout of z-lab's checkpoints: a Qwen3 config with a nested ``dflash_config``, tensors without embedding or head.

z-lab's package, SGLang and vLLM all load it through transformers' ``Qwen3Config`` and read DFlash's own settings in
ways of their own; what they share is here, what they differ in is in one file each.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import Qwen3Config

from dflash_lightning.draft_config import NESTED, DraftConfig
from dflash_lightning.export.base import Exporter, ExportFacts
from dflash_lightning.export.conventions import ACTIVATIONS, Conventions
from dflash_lightning.export.parts import Parts
from dflash_lightning.geometry import SIZES, SLIDING
from dflash_lightning.model.foreign_parts import settings_of

ARCHITECTURES = {
    "marginal": "DFlashDraftModel",
    "selector": "DFlash2DraftModel",
    "lattice": "LiLiCorrDraftModel",
    "prefix": "DominoDraftModel",
    "markov": "DSparkDraftModel",
}


def transformer_settings(config: DraftConfig, facts: ExportFacts) -> dict[str, Any]:
    """Settings of the draft layers under ``Qwen3Config``'s names, every default written out."""
    target = facts.target
    stop = list(target.eos_token_ids)
    theta = config.geometry.rope_theta
    return {
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        **{name: getattr(config, name) for name in SIZES},
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        # Both spellings: transformers 4 and its descendants read the flat one, 5 the nested one.
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "layer_types": list(config.layer_types),
        # Qwen3Config forgets the window unless use_sliding_window is set.
        "use_sliding_window": SLIDING in config.layer_types,
        "sliding_window": config.sliding_window,
        "max_window_layers": config.num_hidden_layers,
        "is_causal": config.is_causal,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": stop[0] if len(stop) == 1 else stop or None,
        "pad_token_id": target.pad_token_id,
    }


def identity(config: DraftConfig, facts: ExportFacts) -> dict[str, Any]:
    """Which target the drafter was made for, and how its prompts were rendered."""
    stated = {"target": dict(config.target)}
    return stated | ({"chat_template_kwargs": facts.chat_template_kwargs} if facts.chat_template_kwargs else {})


def read_qwen3(raw: Mapping[str, Any]) -> Qwen3Config:
    """The config as transformers reads it."""
    return Qwen3Config.from_dict(dict(raw))


def conventions_of(cfg: Qwen3Config | DraftConfig, *, is_causal: bool | None, **stated: Any) -> Conventions:
    """What a config says about the draft layers, with what the consumer reads by itself.

    ``is_causal`` null goes by layer type: sliding layers are causal inside a block, full ones are not.
    """
    if cfg.hidden_act not in ACTIVATIONS:
        raise ValueError(f"hidden_act: {cfg.hidden_act!r} is unknown. Known are {sorted(ACTIVATIONS)}.")
    rope: dict[str, Any] = dict(cfg.rope_parameters or {})
    sliding = [kind == SLIDING for kind in cfg.layer_types or []]
    settings: dict[str, Any] = {
        "causal": tuple(slides if is_causal is None else bool(is_causal) for slides in sliding),
        "windows": tuple(cfg.sliding_window if slides else None for slides in sliding),
        "rope_theta": float(rope["rope_theta"]),
        "rotary_share": float(rope.get("partial_rotary_factor", 1.0)),
        "num_heads": cfg.num_attention_heads,
        "num_kv_heads": cfg.num_key_value_heads,
        "head_dim": cfg.head_dim,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "vocab_size": cfg.vocab_size or 0,
        "scale": cfg.head_dim**-0.5,
        "eps": cfg.rms_norm_eps,
        "activation": cfg.hidden_act,
    }
    return Conventions(**{**settings, **stated})


def required(settings: Mapping[str, Any], key: str, where: str) -> Any:
    """``settings[key]``, which the consumer cannot do without."""
    if settings.get(key) is None:
        raise ValueError(f"config.json states no {where}, and nothing is assumed in its place. Export again.")
    return settings[key]


class Qwen3Layout(Exporter):
    """z-lab's layout; subclasses read it as their consumer does, and may add to it."""

    spellings: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("block_size", f"{NESTED}.block_size"),
        ("num_target_layers", f"{NESTED}.num_target_layers"),
        (f"{NESTED}.target_layer_ids",),
        (f"{NESTED}.mask_token_id",),
        ("rope_theta", "rope_parameters.rope_theta"),
        ("is_causal",),
        ("layer_types",),
        ("head_dim",),
        ("dtype",),
    )

    def config(self, draft_config: DraftConfig, facts: ExportFacts) -> dict[str, Any]:
        nested = {
            "block_size": draft_config.block_size,
            "mask_token_id": draft_config.mask_token_id,
            "target_layer_ids": list(draft_config.target_layer_ids),
            "num_target_layers": draft_config.num_target_layers,
        }
        if facts.logit_scale != 1.0:
            nested["output_multiplier"] = facts.logit_scale
        if facts.softcap is not None:
            nested["final_logit_softcapping"] = facts.softcap
        own = settings_of(draft_config)
        if own:
            causal = draft_config.is_causal  # engines look for either name in the nested block
            nested |= own | {"causal": causal, "is_causal": causal}
        return {
            "architectures": [ARCHITECTURES[draft_config.components["head"]["name"]]],
            **transformer_settings(draft_config, facts),
            "dtype": facts.dtype,
            "block_size": draft_config.block_size,
            "num_target_layers": draft_config.num_target_layers,
            "num_speculative_tokens": draft_config.alignment.num_drafts,
            NESTED: nested,
            **identity(draft_config, facts),
        }

    def read(self, raw: Mapping[str, Any]) -> Conventions:
        nested = {**raw, **(raw.get(NESTED) or {})}
        return self.read_layout(read_qwen3(raw), raw).but(parts=Parts.read(nested))

    @abstractmethod
    def read_layout(self, cfg: Qwen3Config, raw: Mapping[str, Any]) -> Conventions:
        """``read``, once transformers has read its part."""


def ascending(config: DraftConfig, consumer: str) -> list[str]:
    """A limit of servers that collect features as the layers run, whatever the order in the config."""
    ids = list(config.target_layer_ids)
    if ids == sorted(ids):
        return []
    return [f"its target_layer_ids {ids} are not ascending, and {consumer} hands features over in ascending order"]
