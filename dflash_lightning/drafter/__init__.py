"""The trainable backbone between slot inputs and slot hidden states."""

from dflash_lightning.drafter.base import Drafter
from dflash_lightning.drafter.block_transformer import BlockTransformer
from dflash_lightning.drafter.causal_transformer import CausalTransformer
from dflash_lightning.drafter.conv_transformer import ConvTransformer
from dflash_lightning.drafter.feedback_transformer import FeedbackTransformer
from dflash_lightning.drafter.hybrid import HybridDrafter
from dflash_lightning.drafter.sequential import SequentialDrafter
from dflash_lightning.drafter.target_tail import TargetTail

__all__ = [
    "BlockTransformer",
    "CausalTransformer",
    "ConvTransformer",
    "Drafter",
    "FeedbackTransformer",
    "HybridDrafter",
    "SequentialDrafter",
    "TargetTail",
]
