"""Builders: how a proposer's scores become nodes for the target to judge."""

from dflash_lightning.decoding.builder.base import DraftBuilder
from dflash_lightning.decoding.builder.best_first import BestFirstTree
from dflash_lightning.decoding.builder.chain import BestChain, SampledChain
from dflash_lightning.decoding.builder.dual import DualTree
from dflash_lightning.decoding.builder.fan_tree import FanTree
from dflash_lightning.decoding.builder.layers import LayerTree
from dflash_lightning.decoding.builder.priced import CostTree, RooflineTree
from dflash_lightning.decoding.builder.reach import ReachTree
from dflash_lightning.decoding.builder.sampled_tree import SampledTree
from dflash_lightning.decoding.builder.table import TableTree

__all__ = [
    "BestChain",
    "BestFirstTree",
    "CostTree",
    "DraftBuilder",
    "DualTree",
    "FanTree",
    "LayerTree",
    "ReachTree",
    "RooflineTree",
    "SampledChain",
    "SampledTree",
    "TableTree",
]
