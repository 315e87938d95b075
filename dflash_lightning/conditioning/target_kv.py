"""The target's own keys and values as context: nothing is projected (H-Spec, arXiv 2609.24197)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.conditioning.base import BOUNDARY, RowConditioning, Rows
from dflash_lightning.conditioning.kv_injection import FusedFeatures
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.errors import SettingError
from dflash_lightning.geometry import LayerGeometry
from dflash_lightning.layer_ids import check_layer_ids, kv_layer_ids
from dflash_lightning.ops.context import ContextAttention
from dflash_lightning.ops.language_head import LanguageHead
from dflash_lightning.ops.rotary import check_rope
from dflash_lightning.types import FeatureSpec, TargetFacts, TargetFeatures


class TargetKV(RowConditioning):
    """Draft layer ``j`` reads the keys and values that target layer ``kv_layer_ids[j]`` has in its own cache.

    Keys are as the target's attention uses them, normed and rotated, so draft layers must have its key-value heads and
    its rotation. No hidden state is read, nothing is projected and there is nothing to train. In decoding the rows of
    these layers are copied into buffers of fixed size, because the draft step is one graph; H-Spec reads them where
    they are.
    """

    name = "target_kv"
    taps_layers = False

    def __init__(
        self,
        *,
        kv_layer_ids: list[int] | None = None,  # 0-based target layers, one per draft layer; null spaces them evenly
    ) -> None:
        super().__init__()
        self.kv_layer_ids = kv_layer_ids
        self.target_layer_ids = []

    def default_layer_ids(self, num_target_layers: int) -> list[int]:
        return []

    def check(self, facts: TargetFacts, geometry: LayerGeometry) -> None:
        """Refuse layer ids that do not suit, and draft layers whose keys are not of the target's kind."""
        count = geometry.num_hidden_layers
        if self.kv_layer_ids is not None and len(self.kv_layer_ids) != count:
            raise SettingError(
                "conditioning.kv_layer_ids",
                f"{self.kv_layer_ids} names {len(self.kv_layer_ids)} layers, but {count} draft layers read context",
                "Name one for each, or null",
            )
        try:
            check_layer_ids({*(self.kv_layer_ids or ())}, facts.num_layers, name=facts.name)
        except SettingError as error:
            raise SettingError("conditioning.kv_layer_ids", error.what, error.allowed, error.do) from None
        pairs = {
            "num_kv_heads": (geometry.num_key_value_heads, facts.num_kv_heads),
            "head_dim": (geometry.head_dim, facts.head_dim),
        }
        for setting, (own, theirs) in pairs.items():
            if own != theirs:
                raise SettingError(
                    f"drafter.{setting}",
                    f"{own}, but the keys and values of {facts.name} have {theirs}",
                    "Leave it null for the target's",
                )
        theta = check_rope(facts.rope_parameters, where=f"conditioning ({facts.name})")
        if geometry.rope_theta != theta:
            raise SettingError(
                "drafter.rope_parameters",
                f"rope_theta {geometry.rope_theta}, but the keys of {facts.name} are rotated with {theta}",
                "Leave it null for the target's",
            )

    def build(self, config: DraftConfig) -> None:
        assert config.num_target_layers is not None, "only a drafter made for a target reads its keys and values"
        ids = kv_layer_ids(self.kv_layer_ids, config.num_target_layers, config.num_hidden_layers)
        self._kv_ids = tuple(ids)

    def required(self) -> FeatureSpec:
        return FeatureSpec(kv_ids=tuple(sorted({*self._kv_ids})))

    def rows(self, features: TargetFeatures, lm: LanguageHead) -> Rows:
        return Rows(torch.stack(features.select_kv(self._kv_ids), dim=2))

    def keys_and_values(
        self,
        layer: int,
        states: Float[Tensor, "B R *state"],
        positions: Int[Tensor, "B R"],
        attention: ContextAttention,
    ) -> tuple[Float[Tensor, "B R Hkv D"], Float[Tensor, "B R Hkv D"]]:
        return states[:, :, 0, layer], states[:, :, 1, layer]


class SeededTargetKV(TargetKV, FusedFeatures):
    """``TargetKV``, and one state of the last row before the block: ``z = RMSNorm(W_f [h_1; ..; h_T])``.

    Layers with a recurrent state begin from it (H-Spec). ``target_layer_ids`` are the hidden states in ``z``.
    """

    name = "seeded_target_kv"
    provides = frozenset({BOUNDARY})
    taps_layers = True

    def __init__(
        self,
        *,
        kv_layer_ids: list[int] | None = None,  # 0-based target layers, one per draft layer; null spaces them evenly
        target_layer_ids: list[int] | None = None,  # 0-based target layers in the seed; null spaces them evenly
        num_features: int = 5,  # how many, where target_layer_ids is null
    ) -> None:
        FusedFeatures.__init__(self, target_layer_ids=target_layer_ids, num_features=num_features)
        self.kv_layer_ids = kv_layer_ids

    def default_layer_ids(self, num_target_layers: int) -> list[int]:
        return FusedFeatures.default_layer_ids(self, num_target_layers)

    def build(self, config: DraftConfig) -> None:
        TargetKV.build(self, config)
        FusedFeatures.build(self, config)

    def required(self) -> FeatureSpec:
        return TargetKV.required(self) | FusedFeatures.required(self)

    def rows(self, features: TargetFeatures, lm: LanguageHead) -> Rows:
        kv = torch.stack(features.select_kv(self._kv_ids), dim=2)
        return Rows(kv, self.fuse(features.select(self._layer_ids)))
