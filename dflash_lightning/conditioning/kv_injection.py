"""Target features as extra keys and values of every draft layer (DFlash, arXiv 2602.06036 sec. 4.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.conditioning.base import Conditioning
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.layer_ids import default_layer_ids
from dflash_lightning.ops.context import ContextProjection, ContextState, DraftCache, KVSource
from dflash_lightning.ops.norm import RMSNorm
from dflash_lightning.types import BlockLayout, FeatureSpec, TargetFeatures

INIT_STD = 0.02
WARM_START_NOISE = 0.1  # share of the random initial ``fc`` that stays beside the identity


class KVInjection(Conditioning):
    """``RMSNorm(fc([h_1; ..; h_T]))``, one context state per position, which every draft layer projects itself.

    The anchor's own feature is never part of a block's context: it does not exist yet when the block is drafted.
    """

    name = "kv_injection"
    initial = frozenset({"num_features"})

    def __init__(
        self,
        *,
        target_layer_ids: list[int] | None = None,  # 0-based target layers that are read; null spaces them evenly
        num_features: int = 5,  # how many, where target_layer_ids is null
    ) -> None:
        super().__init__()
        if num_features < 1:
            raise ValueError(
                f"conditioning.num_features: {num_features} taps no target layer. Use 1 or more (DFlash uses 5)."
            )
        self.target_layer_ids = target_layer_ids
        self.num_features = num_features

    def default_layer_ids(self, num_target_layers: int) -> list[int]:
        return default_layer_ids(num_target_layers, self.num_features)

    def build(self, config: DraftConfig) -> None:
        self._layer_ids = tuple(config.target_layer_ids)
        self.fc = nn.Linear(len(self._layer_ids) * config.target_hidden_size, config.hidden_size, bias=False)
        nn.init.normal_(self.fc.weight, std=INIT_STD)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def required(self) -> FeatureSpec:
        return FeatureSpec(layer_ids=self._layer_ids)

    def states(self, hidden: Float[Tensor, "B R T Ht"]) -> Float[Tensor, "B R H"]:
        """The context state of every position, from its tapped hidden states in the order of ``required()``."""
        flat = hidden.flatten(2)
        if not torch.is_autocast_enabled(flat.device.type):
            flat = flat.to(self.hidden_norm.weight.dtype)
        return self.hidden_norm(self.fc(flat))

    def prepare(self, features: TargetFeatures, position_ids: Int[Tensor, "B S"], layout: BlockLayout) -> ContextState:
        return _TrainingContext(self.states(features.select(self._layer_ids)), position_ids, layout)

    def extend(self, hidden: Float[Tensor, "B R T Ht"], keep: Int[Tensor, " B"], cache: DraftCache) -> ContextState:
        first = cache.cursor.clone()
        cache.cursor.add_(keep)
        return _DecodingContext(self.states(hidden), first, cache)

    def warm_start_layers(self, num_target_layers: int, *, with_drafter: bool) -> list[int]:
        """With the drafter: the layer that reads the deepest tapped feature itself (or the last layer)."""
        if not with_drafter:
            return []
        return [min(max(self._layer_ids) + 1, num_target_layers - 1)]

    @torch.no_grad()
    def warm_start(self, layers: Mapping[int, Mapping[str, Tensor]]) -> None:
        """``fc`` passes the deepest tapped feature through (plus a little noise); ``hidden_norm`` is its reader's norm.

        Raises:
            ValueError: the target's width is not the drafter's, or the layer has no ``input_layernorm``.
        """
        (layer,) = layers.values()
        norm = layer.get("input_layernorm.weight")
        width, inputs = self.fc.weight.shape
        each = inputs // len(self._layer_ids)
        if norm is None or norm.shape != self.hidden_norm.weight.shape or each != width:
            shape = None if norm is None else tuple(norm.shape)
            raise ValueError(
                f"conditioning: a warm start needs an input_layernorm of shape {(width,)} in target layer "
                f"{next(iter(layers))}, found {shape}, with features of width {each}. "
                "Set drafter.init_from_target=false."
            )
        deepest = self._layer_ids.index(max(self._layer_ids))
        self.fc.weight.mul_(WARM_START_NOISE)
        self.fc.weight[:, deepest * each : (deepest + 1) * each] += torch.eye(width, device=self.fc.weight.device)
        self.hidden_norm.weight.copy_(norm)


@dataclass
class _TrainingContext(ContextState):
    """All context of a batch; blocks see the intervals of their layout."""

    states: Float[Tensor, "B S H"]
    position_ids: Int[Tensor, "B S"]
    layout: BlockLayout
    masks: dict[Any, Any] = field(default_factory=dict)

    def sources(self, layer: int, project: ContextProjection) -> list[KVSource]:
        k, v = project(self.states, self.position_ids)
        layout = self.layout
        return [KVSource(k, v, layout.context_start, layout.context_end, layout.anchors, self.masks)]


@dataclass
class _DecodingContext(ContextState):
    """New rows at positions ``first ..`` beside those that the cache holds; one block per row, at the cursor."""

    states: Float[Tensor, "B R H"]
    first: Int[Tensor, " B"]
    cache: DraftCache

    def sources(self, layer: int, project: ContextProjection) -> list[KVSource]:
        rows = self.first[:, None] + torch.arange(self.states.shape[1], device=self.first.device)
        k, v = project(self.states, rows)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        at = torch.arange(rows.shape[0], device=rows.device)[:, None]
        keys[at, rows] = k.to(keys.dtype)
        values[at, rows] = v.to(values.dtype)
        end = self.cache.cursor[:, None]
        return [KVSource(keys, values, torch.zeros_like(end), end, end)]
