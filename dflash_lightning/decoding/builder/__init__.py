"""Builders: how a proposer's scores become nodes for the target to judge."""

from dflash_lightning.decoding.builder.base import DraftBuilder
from dflash_lightning.decoding.builder.chain import BestChain, SampledChain

__all__ = ["BestChain", "DraftBuilder", "SampledChain"]
