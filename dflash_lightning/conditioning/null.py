"""No target features at all: the drafter knows the anchor's token and nothing else."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from dflash_lightning.conditioning.base import Conditioning
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.ops.context import ContextAttention, ContextState, KVSource
from dflash_lightning.ops.language_head import LanguageHead
from dflash_lightning.types import BlockLayout, FeatureSpec, TargetFeatures


class NullConditioning(Conditioning):
    """Blocks see themselves only (an ablation of DFlash, arXiv 2602.06036 sec. 7.2, read literally).

    RECONSTRUCTED: the paper does not say whether its drafter without target features still embeds the prompt's tokens.
    This is the reading in which it does not; in ``TokenContext`` it does.
    """

    name = "no_features"
    taps_layers = False

    def __init__(self) -> None:
        super().__init__()
        self.target_layer_ids = []

    def default_layer_ids(self, num_target_layers: int) -> list[int]:
        return []

    def build(self, config: DraftConfig) -> None:
        """Nothing to make."""

    def required(self) -> FeatureSpec:
        return FeatureSpec()

    def prepare(
        self, features: TargetFeatures, position_ids: Int[Tensor, "B S"], layout: BlockLayout, lm: LanguageHead
    ) -> ContextState:
        return _NoContext()

    def make_cache(
        self, config: DraftConfig, *, batch_size: int, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        return {}

    def extend(
        self,
        features: TargetFeatures,
        first: Int[Tensor, " B"],
        keep: Int[Tensor, " B"],
        cache: dict[str, Tensor],
        lm: LanguageHead,
    ) -> ContextState:
        return _NoContext()


class _NoContext(ContextState):
    def sources(self, layer: int, attention: ContextAttention) -> list[KVSource]:
        return []
