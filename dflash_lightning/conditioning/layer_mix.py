"""Every draft layer mixes the tapped hidden states for itself (DFlare, the Qwen3 drafter of Tencent's AngelSlim)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.conditioning.base import RowConditioning, Rows
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.errors import SettingError
from dflash_lightning.layer_ids import default_layer_ids
from dflash_lightning.ops.context import ContextAttention
from dflash_lightning.ops.language_head import LanguageHead
from dflash_lightning.ops.norm import RMSNorm
from dflash_lightning.types import FeatureSpec, TargetFeatures

INIT_STD = 0.02
Start = Literal["peak", "distance"]


def start_logits(num_draft_layers: int, num_features: int, start: Start) -> Float[Tensor, "L T"]:
    """Where the mixing logits of every draft layer begin: at its share of the way through the tapped layers.

    ``peak`` (AngelSlim): 2 for tapped layer ``min(T - 1, floor(i T / L))`` and 0 for the others. ``distance``
    (AngelSpec): minus twice the distance to ``round(i (T - 1) / (L - 1))``.
    """
    layers, taps = num_draft_layers, num_features
    logits = torch.zeros(layers, taps)
    for i in range(layers):
        if start == "peak":
            logits[i, min(taps - 1, i * taps // layers)] = 2.0
        else:
            centre = round(i * (taps - 1) / max(layers - 1, 1))
            logits[i] = -2.0 * (torch.arange(taps) - centre).abs()
    return logits


class LayerMix(RowConditioning):
    """``C_i = RMSNorm(sum_t softmax(w_i)_t h_t)``: one mix per draft layer ``i``, one scalar per layer and feature.

    ``w_i`` goes by the order of ``target_layer_ids``, whichever order features are stored in. The norm is shared by all
    draft layers. Context keys and values come from projections of their own (``own_projections``); without them from
    those that the layer has for its block, as in DFlash. The layer's key norm and rotation hold for both.
    """

    name = "layer_mix"

    def __init__(
        self,
        *,
        target_layer_ids: list[int] | None = None,  # 0-based target layers that are read; null spaces them evenly
        num_features: int = 9,  # how many, where target_layer_ids is null
        start: Start = "peak",  # where the mixing logits begin; see start_logits
        own_projections: bool = True,  # separate key and value projections for the context
    ) -> None:
        super().__init__()
        if num_features < 1:
            raise SettingError(
                "conditioning.num_features",
                f"{num_features} taps no target layer",
                "Use 1 or more (DFlare uses 9)",
            )
        if start not in ("peak", "distance"):
            raise SettingError("conditioning.start", f"{start!r} is unknown", allowed="Use 'peak' or 'distance'")
        self.target_layer_ids = target_layer_ids
        self.num_features = num_features
        self.start = start
        self.own_projections = own_projections

    def default_layer_ids(self, num_target_layers: int) -> list[int]:
        return default_layer_ids(num_target_layers, self.num_features)

    def build(self, config: DraftConfig) -> None:
        self._layer_ids = tuple(config.target_layer_ids)
        self._heads = config.num_key_value_heads, config.head_dim
        logits = start_logits(config.num_hidden_layers, len(self._layer_ids), self.start)
        self.mix = nn.Parameter(logits.to(torch.get_default_device()))
        self.context_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if not self.own_projections:
            return
        inner = config.num_key_value_heads * config.head_dim
        self.context_k_proj, self.context_v_proj = (
            nn.ModuleList(nn.Linear(config.hidden_size, inner, bias=False) for _ in range(config.num_hidden_layers))
            for _ in range(2)
        )
        for linear in (*self.context_k_proj, *self.context_v_proj):
            nn.init.normal_(linear.weight, std=INIT_STD)  # type: ignore[arg-type]

    def required(self) -> FeatureSpec:
        return FeatureSpec(layer_ids=self._layer_ids)

    def rows(self, features: TargetFeatures, lm: LanguageHead) -> Rows:
        """States ``[B, R, L, H]``, one per draft layer."""
        hidden = features.select(self._layer_ids)
        if not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(self.mix.dtype)
        return Rows(self.context_norm(self.mix.softmax(-1).to(hidden.dtype) @ hidden))

    def keys_and_values(
        self,
        layer: int,
        states: Float[Tensor, "B R *state"],
        positions: Int[Tensor, "B R"],
        attention: ContextAttention,
    ) -> tuple[Float[Tensor, "B R Hkv D"], Float[Tensor, "B R Hkv D"]]:
        own = states[:, :, layer]
        if not self.own_projections:
            return attention.project(own, positions)
        k, v = (proj[layer](own).unflatten(-1, self._heads) for proj in (self.context_k_proj, self.context_v_proj))
        return attention.finish_keys(k, positions), v

    def warm_start_layers(self, num_target_layers: int, *, with_drafter: bool) -> list[int]:
        """With the drafter: the target's last layers, one per draft layer, as the drafter takes them."""
        if not with_drafter:
            return []
        return list(range(num_target_layers - len(self.mix), num_target_layers))

    @torch.no_grad()
    def warm_start(self, layers: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Own projections start as those of the layers that the draft layers are copied from; the norm as the first's.

        Raises:
            ValueError: a layer lacks these weights, or they are of another shape.
        """
        sources = list(layers.values())
        copy_weight("input_layernorm.weight", sources[0], self.context_norm)
        if self.own_projections:
            for source, k_proj, v_proj in zip(sources, self.context_k_proj, self.context_v_proj, strict=True):
                copy_weight("self_attn.k_proj.weight", source, k_proj)
                copy_weight("self_attn.v_proj.weight", source, v_proj)


def copy_weight(name: str, source: Mapping[str, Tensor], module: nn.Module) -> None:
    """Start ``module`` from the weight ``name`` of a target layer.

    Raises:
        ValueError: the layer has no such weight, or one of another shape.
    """
    found, weight = source.get(name), module.get_parameter("weight")
    if found is None or found.shape != weight.shape:
        shape = None if found is None else tuple(found.shape)
        raise SettingError(
            "conditioning",
            f"a warm start needs {name} of shape {tuple(weight.shape)} in the target's last layers, found {shape}",
            do="Set drafter.init_from_target=false",
        )
    weight.copy_(found)
