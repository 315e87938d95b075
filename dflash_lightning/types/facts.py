"""What drafter and data know of a target without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TargetFacts:
    """What drafter and data need to know of a target without holding its weights.

    ``vocab_size`` counts embedding rows; ``num_tokens`` counts the tokenizer's tokens (0 without a tokenizer).
    ``digest`` identifies the weights (hex; see ``FrozenTarget``); it is empty where they were not all read.
    ``embedding_scale`` is what the family multiplies its embedding rows with inside the model (1.0 for most;
    ``sqrt(hidden_size)`` for Gemma); drafters read *raw* rows.
    """

    name: str
    revision: str | None
    digest: str
    model_type: str
    vocab_size: int
    num_tokens: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_positions: int
    embedding_scale: float
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
