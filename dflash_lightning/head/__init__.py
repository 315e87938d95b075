"""Head axis: from slot hidden states to draft distributions."""

from dflash_lightning.head.base import DraftHead, HeadOutput
from dflash_lightning.head.corrected import CorrectedHead
from dflash_lightning.head.edge import EdgeHead
from dflash_lightning.head.experts import ExpertsHead
from dflash_lightning.head.latent import LatentHead
from dflash_lightning.head.lattice import LatticeHead
from dflash_lightning.head.length import LengthHead
from dflash_lightning.head.marginal import MarginalHead
from dflash_lightning.head.markov import MarkovHead
from dflash_lightning.head.prefix import PrefixHead
from dflash_lightning.head.refiner import RefinerHead
from dflash_lightning.head.selector import SelectorHead
from dflash_lightning.head.survival import SurvivalHead

__all__ = [
    "CorrectedHead",
    "DraftHead",
    "EdgeHead",
    "ExpertsHead",
    "HeadOutput",
    "LatentHead",
    "LatticeHead",
    "LengthHead",
    "MarginalHead",
    "MarkovHead",
    "PrefixHead",
    "RefinerHead",
    "SelectorHead",
    "SurvivalHead",
]
