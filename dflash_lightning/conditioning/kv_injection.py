"""Target features as extra keys and values of every draft layer (DFlash, arXiv 2602.06036 sec. 4.1)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from dflash_lightning.conditioning.fused import FusedFeatures
from dflash_lightning.conditioning.rows import Rows
from dflash_lightning.ops.language_head import LanguageHead
from dflash_lightning.types import TargetFeatures


class KVInjection(FusedFeatures):
    """``RMSNorm(fc([h_1; ..; h_T]))``, one context state per position, which every draft layer projects itself."""

    name = "kv_injection"
    initial = frozenset({"num_features"})

    def rows(self, features: TargetFeatures, lm: LanguageHead) -> Rows:
        return Rows(self.fuse(features.select(self.required().layer_ids)))

    def states(self, hidden: Float[Tensor, "B R T Ht"]) -> Float[Tensor, "B R H"]:
        return self.fuse(hidden)
