"""Draft layers that start as copies of target layers: what fits, and a clear refusal of what does not."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dflash_lightning.drafter.layer import ACTIVATIONS, DraftLayer
from dflash_lightning.errors import SettingError
from dflash_lightning.types import TargetFacts

# Families whose norms multiply by (1 + weight): their norm weights mean something else in a draft layer.
SHIFTED_NORM_FAMILIES = ("gemma", "qwen3_next", "qwen3_5", "recurrent_gemma", "vaultgemma", "t5gemma")
OPTIONAL = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


def check_source(facts: TargetFacts) -> None:
    """Refuse by name a target family whose layers compute something that a draft layer does not."""
    reason = None
    if facts.model_type.startswith(SHIFTED_NORM_FAMILIES):
        reason = "its norms multiply by (1 + weight), a draft layer's by weight"
    elif facts.hidden_act not in ACTIVATIONS:
        reason = f"its activation {facts.hidden_act!r} is none of {sorted(ACTIVATIONS)}"
    if reason is not None:
        raise SettingError(
            "drafter.init_from_target",
            f"draft layers cannot start from {facts.name} ({facts.model_type}): {reason}",
            do="Set init_from_target=false",
        )


def copy_layer(source: Mapping[str, Tensor], layer: DraftLayer, *, where: str) -> None:
    """Copy a target decoder layer's state dict into ``layer``; q/k norms only where the target has them.

    Raises:
        ValueError: a shape differs, or the target layer has weights that a draft layer has no place for (biases,
            experts, further norms): half a layer is not a warm start.
    """
    own = {name: value for name, value in layer.state_dict().items() if not name.startswith(layer.fresh)}
    unknown = sorted(set(source) - set(own))
    missing = sorted(set(own) - set(source) - set(OPTIONAL))
    if unknown or missing:
        raise ValueError(
            f"{where}: the target's layer has {unknown}, which a draft layer does not, and lacks {missing}, so it "
            "cannot be copied. Set drafter.init_from_target=false."
        )
    for name, value in source.items():
        if value.shape != own[name].shape:
            raise ValueError(
                f"{where}: {name} is {tuple(value.shape)} in the target but {tuple(own[name].shape)} in the drafter. "
                "Leave drafter.num_heads, num_kv_heads, head_dim and intermediate_size null to take the target's, "
                "or set init_from_target=false."
            )
    for name, value in source.items():
        own[name].copy_(value)
