"""Contract of the conditioning axis: how target features enter the drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.component import Component
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.ops.context import ContextState, make_kv_cache
from dflash_lightning.ops.language_head import LanguageHead
from dflash_lightning.types import BlockLayout, Carried, FeatureSpec, TargetFeatures


class Conditioning(Component, nn.Module, ABC, axis=True):
    """Turns target features into what the draft layers read.

    Settings only in the constructor; ``build`` makes the weights. ``prepare`` serves training (all context of a batch
    at once, gradients enabled), ``extend`` serves decoding (a chunk of new rows per round, in place, compiled with
    static shapes: no Python branch on tensor values). Both must give a block the same context: a test holds them
    together. ``provides`` names what its contexts offer beyond ``sources`` and ``slot_inputs``; a drafter may need it.
    One that ``carries`` also reads the target's states of drafts that the round before rejected. Training then plays
    such a round for every block but the share ``fresh`` of them (``training.rounds``).
    """

    provides: ClassVar[frozenset[str]] = frozenset()
    taps_layers: ClassVar[bool] = True  # whether there is nothing to read without target layers
    carries: ClassVar[bool] = False
    former: ClassVar[Mapping[str, str]] = {"extend.hidden": "features.hidden holds them"}
    fresh: float = 0.0
    target_layer_ids: list[int] | None

    @abstractmethod
    def default_layer_ids(self, num_target_layers: int) -> list[int]:
        """Target layers to tap when the recipe names none."""

    @abstractmethod
    def build(self, config: DraftConfig) -> None:
        """Make the weights."""

    @abstractmethod
    def required(self) -> FeatureSpec:
        """Target features that ``prepare`` and ``extend`` read besides tokens; known after ``build``."""

    @abstractmethod
    def prepare(
        self, features: TargetFeatures, position_ids: Int[Tensor, "B S"], layout: BlockLayout, lm: LanguageHead
    ) -> ContextState:
        """Context of a training batch; ``lm`` embeds tokens."""

    def make_cache(
        self, config: DraftConfig, *, batch_size: int, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """Static buffers that ``extend`` keeps the context in: keys and values per draft layer unless it is overridden.

        ``num_rows`` is the longest context plus the most rows that are taken in at once.
        """
        shape = (batch_size, num_rows, config.num_key_value_heads, config.head_dim)
        return make_kv_cache(config.num_hidden_layers, shape, dtype=dtype, device=device)

    @abstractmethod
    def extend(
        self,
        features: TargetFeatures,
        first: Int[Tensor, " B"],
        keep: Int[Tensor, " B"],
        cache: dict[str, Tensor],
        lm: LanguageHead,
    ) -> ContextState:
        """Append ``R`` new rows at positions ``first[b] ..``, of which ``keep[b]`` count; returns the context so far.

        A block sees the rows before ``first + keep``, and stands there. What follows is overwritten by the next call.
        ``keep`` may be 0: then the context is that of the call before.
        """

    def carry(self, context: ContextState, carried: Carried) -> ContextState:
        """``context`` with the states of rejected drafts in sight of the blocks, for this round only.

        Called in training and in decoding, where ``carries`` is true. Nothing of ``carried`` may enter the caches. A
        block that may read no row of it must be drafted as if there were none, bit for bit.
        """
        raise NotImplementedError(f"{type(self).__name__} carries nothing")

    def states(self, hidden: Float[Tensor, "B R T Ht"]) -> Float[Tensor, "B R H"]:
        """One context state per position, which every draft layer projects; for generators that keep their own cache.

        Raises:
            ValueError: this conditioning has no such form.
        """
        raise ValueError(
            f"assistant_model: conditioning {self.name!r} cannot be driven by transformers' generate(). "
            "Decode with `dflash generate`."
        )

    def warm_start_layers(self, num_target_layers: int, *, with_drafter: bool) -> list[int]:
        """Target decoder layers whose weights ``warm_start`` wants to see, known after ``build``.

        With none it is not called, and all weights start at random. ``with_drafter`` says whether the drafter starts
        from the target; a conditioning may wish the same or not.
        """
        return []

    def warm_start(self, layers: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Start from the target: ``layers`` holds the state dict of every layer of ``warm_start_layers``."""
