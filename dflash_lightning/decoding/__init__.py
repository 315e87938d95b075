"""Lossless speculative decoding: one loop, parts that are swapped.

Names load on first use (``lazy.py``): statistics and intervals are read without the decoder and what it imports.
"""

from typing import TYPE_CHECKING

from dflash_lightning.lazy import lazy_names

if TYPE_CHECKING:
    from dflash_lightning.decoding.decoder import DecodeResult, SpeculativeDecoder
    from dflash_lightning.decoding.sampling import SamplingSpec
    from dflash_lightning.decoding.settings import DecodingSettings
    from dflash_lightning.decoding.stats import DecodeStats
    from dflash_lightning.decoding.types import Generation

__all__ = ["DecodeResult", "DecodeStats", "DecodingSettings", "Generation", "SamplingSpec", "SpeculativeDecoder"]

__getattr__ = lazy_names(
    __name__,
    {
        "DecodeResult": "dflash_lightning.decoding.decoder",
        "DecodeStats": "dflash_lightning.decoding.stats",
        "DecodingSettings": "dflash_lightning.decoding.settings",
        "Generation": "dflash_lightning.decoding.types",
        "SamplingSpec": "dflash_lightning.decoding.sampling",
        "SpeculativeDecoder": "dflash_lightning.decoding.decoder",
    },
)
