"""Builders: how a proposer's scores become nodes for the target to judge."""

from dflash_lightning.decoding.builder.base import DraftBuilder
from dflash_lightning.decoding.builder.best_first import BestFirstTree
from dflash_lightning.decoding.builder.chain import BestChain, SampledChain
from dflash_lightning.decoding.builder.fan_tree import FanTree
from dflash_lightning.decoding.builder.sampled_tree import SampledTree

__all__ = ["BestChain", "BestFirstTree", "DraftBuilder", "FanTree", "SampledChain", "SampledTree"]
