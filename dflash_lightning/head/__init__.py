"""Head axis: from slot hidden states to draft distributions."""

from dflash_lightning.head.base import DraftHead, HeadOutput
from dflash_lightning.head.marginal import MarginalHead

__all__ = ["DraftHead", "HeadOutput", "MarginalHead"]
