"""How target features enter the drafter."""

from dflash_lightning.conditioning.base import Conditioning
from dflash_lightning.conditioning.carryover import Carryover
from dflash_lightning.conditioning.fixed_views import FixedViews
from dflash_lightning.conditioning.input_fusion import InputFusion
from dflash_lightning.conditioning.kv_injection import KVInjection
from dflash_lightning.conditioning.layer_mix import LayerMix
from dflash_lightning.conditioning.null import NullConditioning
from dflash_lightning.conditioning.residual_mix import ResidualMix
from dflash_lightning.conditioning.retrace import ReTrace
from dflash_lightning.conditioning.target_kv import SeededTargetKV, TargetKV
from dflash_lightning.conditioning.token_context import TokenContext
from dflash_lightning.conditioning.token_fusion import TokenFusion

__all__ = [
    "Carryover",
    "Conditioning",
    "FixedViews",
    "InputFusion",
    "KVInjection",
    "LayerMix",
    "NullConditioning",
    "ReTrace",
    "ResidualMix",
    "SeededTargetKV",
    "TargetKV",
    "TokenContext",
    "TokenFusion",
]
