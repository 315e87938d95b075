"""The trainable backbone between slot inputs and slot hidden states."""

from dflash_lightning.drafter.base import Drafter
from dflash_lightning.drafter.block_transformer import BlockTransformer
from dflash_lightning.drafter.target_tail import TargetTail

__all__ = ["BlockTransformer", "Drafter", "TargetTail"]
