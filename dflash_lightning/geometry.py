"""The sizes and the attention of draft layers: stated once, and read by everything else field by field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dflash_lightning.errors import SettingError
from dflash_lightning.types import TargetFacts

Size = int  # positive in every drafter; 0 where a file states none
SLIDING = "sliding_attention"
LAYER_TYPES = ("full_attention", SLIDING)


@dataclass(frozen=True, kw_only=True)
class LayerGeometry:
    """From what the shapes of draft layers follow, and who sees whom in them; names are those of ``config.json``.

    A setting that is added here is in ``DraftConfig`` and its files, and is compared by ``init_from``. Fields stand in
    the order in which files list them. ``is_causal`` null means by layer type: sliding layers are causal inside a
    block, full ones see the whole block. ``sliding_window`` counts positions.
    """

    hidden_size: Size = 0  # the target's
    intermediate_size: Size = 0
    num_hidden_layers: Size = 0
    num_attention_heads: Size = 0
    num_key_value_heads: Size = 0
    head_dim: Size = 0
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int = 0  # the target's
    layer_types: list[str] | None = None  # one of LAYER_TYPES per layer; null: all full
    sliding_window: int | None = None
    is_causal: bool | None = None

    @classmethod
    def of(cls, facts: TargetFacts, settings: Mapping[str, Any]) -> LayerGeometry:
        """Layers with the target's own sizes, but for what ``settings`` state other than null; further names may be."""
        stated = {**vars(facts), **{name: value for name, value in settings.items() if value is not None}}
        stated["max_position_embeddings"] = facts.max_positions
        named = {FIELD_OF.get(name, name): value for name, value in stated.items()}
        return cls(**{name: named[name] for name in GEOMETRY if name in named})

    @property
    def rope_theta(self) -> float:
        """The rotary base."""
        return float((self.rope_parameters or {})["rope_theta"])

    def check(self) -> None:
        """Refuse layer types and a window that do not go together, and a norm that no value is divided by.

        Raises:
            SettingError: says which field, and what it must be.
        """
        types, layers = self.layer_types, self.num_hidden_layers
        if types is not None and len(types) != layers:
            raise SettingError("layer_types", f"{len(types)} entries for {layers} layers", "Give one per layer")
        if SLIDING in (types or ()) and not self.sliding_window:
            raise SettingError(
                "sliding_window", "null, but layer_types has sliding layers", "Give the window in positions"
            )
        if not 0.0 <= self.rms_norm_eps < math.inf:  # null is no number, and refused elsewhere
            raise SettingError("rms_norm_eps", f"{self.rms_norm_eps} is not >= 0 and finite", "Models use 1e-6 or 1e-5")


GEOMETRY = tuple(field.name for field in fields(LayerGeometry))
SIZES = tuple(field.name for field in fields(LayerGeometry) if field.type == "Size")
OF_TARGET = ("hidden_size", "max_position_embeddings")  # what no drafter decides
# Fields that settings of drafters and facts of targets have shorter names for.
FIELD_OF = {
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "num_layers": "num_hidden_layers",
}
