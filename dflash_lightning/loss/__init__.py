"""Loss axis: sums over slots, divided only after every rank has been counted."""

from dflash_lightning.loss.base import LossTerm
from dflash_lightning.loss.confidence import ConfidenceLoss
from dflash_lightning.loss.cross_entropy import CrossEntropy
from dflash_lightning.loss.divergence import Divergence, TotalVariation
from dflash_lightning.loss.expected_length import BlockVerificationLoss, DPace
from dflash_lightning.loss.slotwise import SlotwiseLoss
from dflash_lightning.loss.weighted import WeightedLoss

__all__ = [
    "BlockVerificationLoss",
    "ConfidenceLoss",
    "CrossEntropy",
    "DPace",
    "Divergence",
    "LossTerm",
    "SlotwiseLoss",
    "TotalVariation",
    "WeightedLoss",
]
