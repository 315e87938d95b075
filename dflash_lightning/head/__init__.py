"""Head axis: from slot hidden states to draft distributions."""

from dflash_lightning.head.base import DraftHead, HeadOutput
from dflash_lightning.head.lattice import LatticeHead
from dflash_lightning.head.marginal import MarginalHead
from dflash_lightning.head.markov import MarkovHead
from dflash_lightning.head.selector import SelectorHead
from dflash_lightning.head.survival import SurvivalHead

__all__ = [
    "DraftHead",
    "HeadOutput",
    "LatticeHead",
    "MarginalHead",
    "MarkovHead",
    "SelectorHead",
    "SurvivalHead",
]
