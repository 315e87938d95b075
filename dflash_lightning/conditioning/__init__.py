"""How target features enter the drafter."""

from dflash_lightning.conditioning.base import Conditioning
from dflash_lightning.conditioning.kv_injection import KVInjection
from dflash_lightning.conditioning.null import NullConditioning

__all__ = ["Conditioning", "KVInjection", "NullConditioning"]
