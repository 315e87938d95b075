"""DFlash's fused features, and beside them a mix for every draft layer (DFly, arXiv 2607.25852)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.conditioning.base import Rows
from dflash_lightning.conditioning.kv_injection import FusedFeatures
from dflash_lightning.conditioning.layer_mix import Start, start_logits
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.errors import SettingError
from dflash_lightning.ops.context import ContextAttention
from dflash_lightning.ops.language_head import LanguageHead
from dflash_lightning.types import TargetFeatures


class ResidualMix(FusedFeatures):
    """``C_i = RMSNorm(fc([h_1; ..; h_T]) + sum_t softmax(w_i)_t h_t)``, one state per draft layer ``i``.

    ``fc`` and the norm are shared by all draft layers, ``w_i`` is one scalar per draft layer and feature. A layer
    projects its state by the key and value projections that it has for its block, as in DFlash. ``w_i`` goes by the
    order of ``target_layer_ids``. From MT 2.2 (AngelSpec's code); where ``w_i`` begins is read from its DFlare.
    """

    name = "residual_mix"
    initial = frozenset({"num_features", "start"})

    def __init__(
        self,
        *,
        target_layer_ids: list[int] | None = None,  # 0-based target layers that are read; null spaces them evenly
        num_features: int = 5,  # how many, where target_layer_ids is null
        start: Start = "distance",  # where the mixing logits begin; see layer_mix.start_logits
    ) -> None:
        super().__init__(target_layer_ids=target_layer_ids, num_features=num_features)
        if start not in ("peak", "distance"):
            raise SettingError("conditioning.start", f"{start!r} is unknown", allowed="Use 'peak' or 'distance'")
        self.start = start

    def build(self, config: DraftConfig) -> None:
        super().build(config)
        logits = start_logits(config.num_hidden_layers, len(self._layer_ids), self.start)
        self.mix = nn.Parameter(logits.to(torch.get_default_device()))

    def rows(self, features: TargetFeatures, lm: LanguageHead) -> Rows:
        """States ``[B, R, L, H]``, one per draft layer."""
        hidden = features.select(self._layer_ids)
        if not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(self.mix.dtype)
        mixed = self.mix.softmax(-1).to(hidden.dtype) @ hidden
        return Rows(self.hidden_norm(self.fc(hidden.flatten(2))[:, :, None] + mixed))

    def keys_and_values(
        self,
        layer: int,
        states: Float[Tensor, "B R *state"],
        positions: Int[Tensor, "B R"],
        attention: ContextAttention,
    ) -> tuple[Float[Tensor, "B R Hkv D"], Float[Tensor, "B R Hkv D"]]:
        return attention.project(states[:, :, layer], positions)
