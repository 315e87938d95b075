"""Loss axis: sums over slots, divided only after every rank has been counted."""

from dflash_lightning.loss.base import LossTerm, SlotwiseLoss
from dflash_lightning.loss.confidence import ConfidenceLoss
from dflash_lightning.loss.expected_length import BlockVerificationLoss, DPace
from dflash_lightning.loss.reach import ReachLoss
from dflash_lightning.loss.weighted import CrossEntropy, Divergence, TotalVariation, WeightedLoss

__all__ = [
    "BlockVerificationLoss",
    "ConfidenceLoss",
    "CrossEntropy",
    "DPace",
    "Divergence",
    "LossTerm",
    "ReachLoss",
    "SlotwiseLoss",
    "TotalVariation",
    "WeightedLoss",
]
