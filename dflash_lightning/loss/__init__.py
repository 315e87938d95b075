"""Loss axis: sums over slots, divided only after every rank has been counted."""

from dflash_lightning.loss.base import LossShare, LossTerm, SlotwiseLoss, total_loss
from dflash_lightning.loss.clipped import ClippedReverseKL
from dflash_lightning.loss.confidence import ConfidenceLoss
from dflash_lightning.loss.cross_entropy import CrossEntropy
from dflash_lightning.loss.divergence import Divergence, TotalVariation
from dflash_lightning.loss.expected_length import BlockVerificationLoss, DPace
from dflash_lightning.loss.fading import FadingCrossEntropy
from dflash_lightning.loss.lattice import LatticeLoss
from dflash_lightning.loss.length import LengthLoss
from dflash_lightning.loss.on_policy import OnPolicyLoss
from dflash_lightning.loss.product import ProductLoss
from dflash_lightning.loss.reach import ReachLoss
from dflash_lightning.loss.refined import RefinedLoss
from dflash_lightning.loss.selector import CandidateCrossEntropy
from dflash_lightning.loss.stepped import SteppedCrossEntropy
from dflash_lightning.loss.weighted import WeightedLoss

__all__ = [
    "BlockVerificationLoss",
    "CandidateCrossEntropy",
    "ClippedReverseKL",
    "ConfidenceLoss",
    "CrossEntropy",
    "DPace",
    "Divergence",
    "FadingCrossEntropy",
    "LatticeLoss",
    "LengthLoss",
    "LossShare",
    "LossTerm",
    "OnPolicyLoss",
    "ProductLoss",
    "ReachLoss",
    "RefinedLoss",
    "SlotwiseLoss",
    "SteppedCrossEntropy",
    "TotalVariation",
    "WeightedLoss",
    "total_loss",
]
