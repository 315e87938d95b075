"""Target features as extra keys and values of every draft layer (DFlash, arXiv 2602.06036 sec. 4.1)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dflash_lightning.conditioning.base import BOUNDARY, RowConditioning, Rows
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.errors import SettingError
from dflash_lightning.layer_ids import default_layer_ids
from dflash_lightning.ops.language_head import LanguageHead
from dflash_lightning.ops.norm import RMSNorm
from dflash_lightning.types import FeatureSpec, TargetFeatures

INIT_STD = 0.02
WARM_START_NOISE = 0.1  # share of the random initial ``fc`` that stays beside the identity


class FusedFeatures(RowConditioning):
    """Base of conditionings that read ``C = RMSNorm(fc([h_1; ..; h_T]))``, one state per position."""

    def __init__(
        self,
        *,
        target_layer_ids: list[int] | None = None,  # 0-based target layers that are read; null spaces them evenly
        num_features: int = 5,  # how many, where target_layer_ids is null
    ) -> None:
        super().__init__()
        if num_features < 1:
            raise SettingError(
                "conditioning.num_features", f"{num_features} taps no target layer", "Use 1 or more (DFlash uses 5)"
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

    def fuse(self, hidden: Float[Tensor, "B R T Ht"]) -> Float[Tensor, "B R H"]:
        """The state of every position, from its tapped hidden states in the order of ``required()``."""
        flat = hidden.flatten(2)
        if not torch.is_autocast_enabled(flat.device.type):
            flat = flat.to(self.hidden_norm.weight.dtype)
        return self.hidden_norm(self.fc(flat))

    def warm_start_layers(self, num_target_layers: int, *, with_drafter: bool) -> list[int]:
        """With the drafter: the layer that reads the deepest tapped feature itself (the last if none comes after)."""
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
            raise SettingError(
                "conditioning",
                f"a warm start needs an input_layernorm of shape {(width,)} in target layer {next(iter(layers))}, "
                f"found {shape}, with features of width {each}",
                do="Set drafter.init_from_target=false",
            )
        deepest = self._layer_ids.index(max(self._layer_ids))
        self.fc.weight.mul_(WARM_START_NOISE)
        self.fc.weight[:, deepest * each : (deepest + 1) * each] += torch.eye(width, device=self.fc.weight.device)
        self.hidden_norm.weight.copy_(norm)


class KVInjection(FusedFeatures):
    """``RMSNorm(fc([h_1; ..; h_T]))``, one context state per position, which every draft layer projects itself.

    Its ``boundary`` is the state of the last row before a block, kept only where somebody reads it.
    """

    name = "kv_injection"
    initial = frozenset({"num_features"})
    provides = frozenset({BOUNDARY})

    @property
    def keeps_boundary(self) -> bool:
        return BOUNDARY in self.wanted

    def rows(self, features: TargetFeatures, lm: LanguageHead) -> Rows:
        states = self.fuse(features.select(self.required().layer_ids))
        return Rows(states, boundary=states if self.keeps_boundary else None)

    def states(self, hidden: Float[Tensor, "B R T Ht"]) -> Float[Tensor, "B R H"]:
        return self.fuse(hidden)
