"""What differs between model families: which can work, where their parts are, how they scale embeddings and logits."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

# Families whose features, packing and decoding the test suite holds equal to transformers' own forward and generate.
VERIFIED_FAMILIES = (
    "llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "mixtral", "qwen3_moe", "mistral", "granite",
    "cohere",
)  # fmt: skip

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")  # as families spell it
_ATTENTION_KINDS = ("full_attention", "sliding_attention", "chunked_attention")
_ALIBI_FAMILIES = ("bloom", "mpt")
# Families that would be decoded wrongly, and why; all others are swept by a test.
_UNFIT = {
    "dory": "it scales every logit by a factor of its own, which drafters do not know",
    "gpt_neo": "it masks by the number of cached rows instead of positions, so rows of a ragged batch see later tokens",
    "moshi": "its forward looks at all tokens while its cache keeps a window of them, so that its own generate differs",
}
_LAYER_LIST_NAMES = ("layers", "h", "blocks")
_FINAL_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")
_SWITCHING_ROPES = ("longrope", "su")  # "su" is what Phi-3's first files call it
_SPAN_NAME = re.compile(r"^(?!.*(layer|pattern|num_)).*(window|chunk)")


def setting(config: PretrainedConfig, *names: str, default: Any = None) -> Any:
    """First of the settings ``names`` that the configuration has, not null: families spell them differently.

    Of a setting that differs from layer to layer it is the one that most layers have.
    """
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # transformers refuses to name one value of a setting that single layers override
            value = config.__dict__.get(name)
        if value is not None:
            return value
    return default


def varies(config: PretrainedConfig, name: str) -> bool:
    """Whether single layers override the setting ``name``."""
    try:
        getattr(config, name, None)
    except RuntimeError:
        return True
    return False


def refuse(config: PretrainedConfig, source: str, reason: str, advice: str) -> ValueError:
    """The one error for a family that cannot be a target."""
    return ValueError(
        f"target: {source} is of family {config.model_type!r}, which cannot be a target: {reason}. {advice} "
        f"Verified families: {', '.join(VERIFIED_FAMILIES)}."
    )


def check_family(config: PretrainedConfig, source: str) -> None:
    """Refuse a family that cannot work, from its configuration alone, so that no weight is loaded for nothing.

    Raises:
        ValueError: encoder-decoder, multimodal wrapper, recurrent or linear attention, ALiBi or queries scaled by row,
            attention kinds or shared key-value layers that rollback cannot represent, or no causal LM at all. The
            message says which and why.
    """
    other = "Use a decoder-only causal language model with softmax attention."
    if config.is_encoder_decoder:
        raise refuse(config, source, "it is an encoder-decoder, and a drafter reads a decoder-only context", other)
    if config.get_text_config() is not config:
        advice = "Save its language model by itself (AutoModelForCausalLM of its text_config) and use that folder."
        raise refuse(config, source, "it is a multimodal wrapper around a language model", advice)
    kinds = set(setting(config, "layer_types", default=[]))
    model_class = causal_lm_class(config)
    if (model_class is not None and model_class._is_stateful) or kinds & {
        "linear_attention",
        "mamba",
        "conv",
        "recurrent",
    }:
        raise refuse(config, source, "its recurrent state cannot be rolled back after a rejected draft", other)
    if unknown := sorted(kinds - {*_ATTENTION_KINDS}):
        raise refuse(config, source, f"it has layers of kind {unknown}, whose masks are not supported", other)
    if setting(config, "attn_temperature_tuning", default=False) and setting(config, "floor_scale") is not None:
        reason = "it scales queries by their row in a forward (attn_temperature_tuning), which is not their position"
        raise refuse(config, source, reason, other)
    if config.model_type in _ALIBI_FAMILIES or setting(config, "alibi", default=False):
        raise refuse(
            config, source, "it counts positions from the attention mask (ALiBi), so rows cannot be packed", other
        )
    if varies(config, "sliding_window"):
        raise refuse(config, source, "its layers have windows of different sizes", other)
    if config.model_type in _UNFIT:
        raise refuse(config, source, _UNFIT[config.model_type], other)
    if setting(config, "num_kv_shared_layers", default=0):
        raise refuse(config, source, "its layers share key-value states", other)
    if model_class is None and "AutoModelForCausalLM" not in setting(config, "auto_map", default={}):
        raise refuse(config, source, "transformers has no causal language model for it", other)


def causal_lm_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """transformers' own causal LM class of a configuration; null when it has none (for example remote code)."""
    mapping = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        return None
    found = mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found


@dataclass(frozen=True)
class Anatomy:
    """Where the parts of a causal LM are: ``decoder`` owns the child modules ``layers_name`` and ``norm_name``."""

    decoder: nn.Module
    layers_name: str
    norm_name: str

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, in order."""
        found = self.decoder._modules[self.layers_name]
        assert isinstance(found, nn.ModuleList)
        return found


def find_anatomy(model: PreTrainedModel, source: str) -> Anatomy:
    """The decoder, its layer list and its final norm.

    Raises:
        ValueError: the model has no such structure or its decoder takes no ``position_ids``.
    """
    decoder = model.get_decoder()
    if decoder is model:  # transformers looks for it under a name that the family does not use (Llama 4)
        decoder = getattr(model, "model", model)
    children = dict(decoder.named_children())
    num_layers = model.config.num_hidden_layers
    lists = [
        n for n in _LAYER_LIST_NAMES if isinstance(children.get(n), nn.ModuleList) and len(children[n]) == num_layers
    ]
    norms = [n for n in _FINAL_NORM_NAMES if n in children]
    advice = "Open an issue with its config.json, or use a verified family."
    if len(lists) != 1 or len(norms) != 1:
        reason = (
            f"its decoder {type(decoder).__name__} has no single list of {num_layers} layers with a final norm after it"
        )
        raise refuse(model.config, source, reason, advice)
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise refuse(model.config, source, "its decoder takes no position_ids, so rows cannot be packed", advice)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not isinstance(head, nn.Linear):
        raise refuse(model.config, source, "its language head is not one linear layer", advice)
    if not head.weight.is_floating_point():
        reason = "its language head is quantised, and drafters need its rows"
        raise refuse(model.config, source, reason, "Use a checkpoint whose lm_head is not quantised.")
    widths = (model.config.hidden_size, head.in_features, _width(embedding))
    if len(set(widths)) != 1:
        reason = f"its layers are {widths[0]} wide, its head {widths[1]} and its embedding {widths[2]}"
        raise refuse(model.config, source, reason, advice)
    return Anatomy(decoder, lists[0], norms[0])


def _width(embedding: nn.Module) -> int | None:
    weight = getattr(embedding, "weight", None)
    return weight.shape[1] if isinstance(weight, torch.Tensor) and weight.ndim == 2 else None


def check_structure(config: PretrainedConfig, source: str) -> None:
    """Build an unverified family without storage (meta device) and look for the parts that are needed of it."""
    model_class = causal_lm_class(config)
    if config.model_type in VERIFIED_FAMILIES or model_class is None:
        return
    with torch.device("meta"):
        find_anatomy(model_class(config), source)


def embedding_scale(config: PretrainedConfig) -> float:
    """What the family multiplies its embedding rows with inside the model."""
    if "gemma" in config.model_type:  # VaultGemma too
        return float(config.hidden_size) ** 0.5
    return float(setting(config, "embedding_multiplier", "scale_emb", default=1.0))


def head_scale(config: PretrainedConfig) -> float:
    """What the family multiplies its logits with, before a soft cap."""
    if (divisor := setting(config, "logits_scaling")) is not None:  # Granite
        return 1.0 / float(divisor)
    return float(setting(config, "logit_scale", default=1.0))  # Cohere


def head_softcap(config: PretrainedConfig) -> float | None:
    """``c`` of ``c * tanh(logits / c)``, Gemma's soft cap."""
    cap = setting(config, "final_logit_softcapping")
    return None if cap is None else float(cap)


def rope_settings(config: PretrainedConfig) -> dict[str, Any]:
    """Rotary settings of the full-attention layers; base 10000 where the family has none of its own."""
    found = setting(config, "rope_parameters", default={})
    nested = found.get("full_attention", found)
    return dict(nested) if nested else {"rope_type": "default", "rope_theta": 10000.0}


def attention_spans(config: PretrainedConfig) -> list[int]:
    """Every number of the configuration that bounds how far a layer looks: windows and chunks, whatever their names."""
    values = {name: value for name, value in config.to_dict().items() if _SPAN_NAME.search(name)}
    return sorted({v for v in values.values() if isinstance(v, int) and not isinstance(v, bool) and v > 0})


@dataclass(frozen=True)
class LengthLimit:
    """Up to ``positions`` a row is computed alike whatever stands beside it; ``reason`` is what changes beyond."""

    positions: int
    reason: str


def length_limit(config: PretrainedConfig) -> LengthLimit | None:
    """Where the model begins to compute a whole forward otherwise because one of its rows is long; null if nowhere.

    LongRoPE then rotates *all* positions with other frequencies, those of the short rows in the batch too. Doge masks
    keys by rank among all keys of the forward. ("dynamic" RoPE changes too, but only past
    ``max_position_embeddings``, where nothing goes.)
    """
    found = setting(config, "rope_parameters", "rope_scaling", default={})
    lengths = []
    for rope in [found, *found.values()]:
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in _SWITCHING_ROPES:
            length = rope.get("original_max_position_embeddings")
            lengths.append(length or setting(config, "original_max_position_embeddings", "max_position_embeddings"))
    limits = [LengthLimit(int(length), "rotates with other frequencies (LongRoPE)") for length in lengths if length]
    if (kept := setting(config, "keep_window_size")) is not None:
        limits.append(LengthLimit(int(kept), "masks keys by their rank among all keys"))
    return min(limits, key=lambda limit: limit.positions, default=None)


def sliding_window(config: PretrainedConfig) -> int | None:
    """Window of the sliding layers: a row sees itself and the ``window - 1`` rows before it; null without any."""
    kinds = setting(config, "layer_types")
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    window = setting(config, "sliding_window")
    return None if window is None else int(window)


def chunk_size(config: PretrainedConfig) -> int | None:
    """Positions per chunk of the chunked layers: a row sees the rows of its own chunk up to itself; null without any.

    Chunks are counted from the first position of a sequence.
    """
    chunk = setting(config, "attention_chunk_size")
    return None if chunk is None else int(chunk)
