"""Head axis: from slot hidden states to draft distributions."""

from dflash_lightning.head.base import DraftHead, HeadOutput
from dflash_lightning.head.edge import EdgeHead
from dflash_lightning.head.marginal import MarginalHead
from dflash_lightning.head.markov import MarkovHead
from dflash_lightning.head.survival import SurvivalHead

__all__ = [
    "DraftHead",
    "EdgeHead",
    "HeadOutput",
    "MarginalHead",
    "MarkovHead",
    "SurvivalHead",
]
