"""Head axis: from slot hidden states to draft distributions."""

from dflash_lightning.head.base import DraftHead
from dflash_lightning.head.marginal import MarginalHead

__all__ = ["DraftHead", "MarginalHead"]
