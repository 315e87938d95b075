"""Lossless speculative decoding: one loop, parts that are swapped."""

from dflash_lightning.decoding.decoder import DecodeResult, SpeculativeDecoder
from dflash_lightning.decoding.sampling import SamplingSpec
from dflash_lightning.decoding.settings import DecodingSettings
from dflash_lightning.decoding.stats import DecodeStats
from dflash_lightning.decoding.types import Generation

__all__ = ["DecodeResult", "DecodeStats", "DecodingSettings", "Generation", "SamplingSpec", "SpeculativeDecoder"]
