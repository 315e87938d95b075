"""Loss axis: sums over slots, divided only after every rank has been counted."""

from dflash_lightning.loss.base import LossTerm
from dflash_lightning.loss.cross_entropy import CrossEntropy

__all__ = ["CrossEntropy", "LossTerm"]
