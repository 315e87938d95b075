"""Contract of the head axis: from slot hidden states to draft distributions."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor, nn

from dflash_lightning.component import Component
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.ops.lm_head import HeadOutput, LanguageHead, View
from dflash_lightning.types import BlockLayout, FeatureSpec

__all__ = ["DraftHead", "HeadOutput"]


class DraftHead(Component, nn.Module, ABC, axis=True):
    """Says what the draft distributions of a block are; ``[slots, vocabulary]`` logits never exist in training.

    ``views`` serves training: every view answers per-slot requests (see ``ops.lm_head``). ``logits`` serves decoding.
    Heads that draw token by token override ``draw`` in a later contract; this one covers position-wise marginals.
    """

    @abstractmethod
    def build(self, config: DraftConfig) -> None:
        """Make the weights, if there are any."""

    def required(self) -> FeatureSpec:
        """Target features that ``views`` reads besides the hidden states it is given."""
        return FeatureSpec()

    @abstractmethod
    def views(self, hidden: Float[Tensor, "B N K H"], layout: BlockLayout, lm: LanguageHead) -> dict[str, View]:
        """The distributions losses may ask about, by name; ``"main"`` is the one that is decoded with."""

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "B Kp H"], lm: LanguageHead) -> Float[Tensor, "B Kp V"]:
        """Draft logits of the predicting slots, one column per row of ``lm`` (its own ids where it is reduced)."""
