"""Contract of the conditioning axis: how target features enter the drafter.

Below the contract: ``RowConditioning``, the base of those whose context is one row per position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.component import Component
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.geometry import LayerGeometry
from dflash_lightning.ops.context import ContextAttention, ContextState, KVSource, make_kv_cache, write_kv
from dflash_lightning.ops.language_head import LanguageHead
from dflash_lightning.types import BlockLayout, Carried, FeatureSpec, TargetFacts, TargetFeatures


class Conditioning(Component, nn.Module, ABC, axis=True):
    """Turns target features into what the draft layers read.

    Settings only in the constructor; ``build`` makes the weights. ``prepare`` serves training (all context of a batch
    at once, gradients enabled), ``extend`` serves decoding (a chunk of new rows per round, in place, compiled with
    static shapes: no Python branch on tensor values). Both must give a block the same context: a test holds them
    together. ``provides`` names what its contexts offer beyond ``sources`` and ``slot_inputs``; a drafter or a head may
    need it. ``wanted`` is what those of this model do need, set by the model.
    One that ``carries`` also reads the target's states of drafts that the round before rejected. Training then plays
    such a round for the blocks of all documents but a share ``fresh`` (``training.rounds``). If it also ``recalls``, it
    reads the drafter's own last hidden states of those drafts, too.
    """

    provides: ClassVar[frozenset[str]] = frozenset()
    taps_layers: ClassVar[bool] = True  # whether there is nothing to read without target layers
    carries: ClassVar[bool] = False
    recalls: ClassVar[bool] = False
    borrows: ClassVar[bool] = False  # reads the target's own keys and values, whose shape is the drafter's then
    former: ClassVar[Mapping[str, str]] = {"extend.hidden": "features.hidden holds them"}
    fresh: float = 0.0
    wanted: frozenset[str] = frozenset()
    target_layer_ids: list[int] | None

    @property
    def draft_layers(self) -> int | None:
        """How many draft layers it serves; null: any number."""
        return None

    @abstractmethod
    def default_layer_ids(self, num_target_layers: int) -> list[int]:
        """Target layers to tap when the recipe names none."""

    def check(self, facts: TargetFacts, geometry: LayerGeometry) -> None:
        """Refuse a target, or draft layers, that this conditioning cannot serve; by default it serves all.

        Raises:
            ValueError: names the setting.
        """

    @abstractmethod
    def build(self, config: DraftConfig) -> None:
        """Make the weights."""

    @abstractmethod
    def required(self) -> FeatureSpec:
        """Target features that ``prepare`` and ``extend`` read, and whether they read tokens; known after ``build``."""

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

    def at_step(self, step: int) -> None:
        """Told before a round is played in training how many optimizer steps were made; by default of no interest."""

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


BOUNDARY = "boundary"
JOIN = "join"


@dataclass
class Rows:
    """One context row per position. ``boundary`` is what the last row of a context says to the slots, where it does."""

    states: Float[Tensor, "B R *state"]
    boundary: Float[Tensor, "B R C"] | None = None


class RowConditioning(Conditioning):
    """Base of conditionings whose context is a row per position, projected to keys and values by every draft layer.

    Row ``j`` depends on the features of position ``j`` alone. A block sees the rows before its anchor: the anchor's own
    feature does not exist yet when the block is drafted.
    """

    @property
    def keeps_boundary(self) -> bool:
        """Whether ``rows`` gives a boundary."""
        return BOUNDARY in self.provides

    @abstractmethod
    def rows(self, features: TargetFeatures, lm: LanguageHead) -> Rows:
        """The rows of all positions of ``features``."""

    def keys_and_values(
        self,
        layer: int,
        states: Float[Tensor, "B R *state"],
        positions: Int[Tensor, "B R"],
        attention: ContextAttention,
    ) -> tuple[Float[Tensor, "B R Hkv D"], Float[Tensor, "B R Hkv D"]]:
        """What draft layer ``layer`` makes of the rows; by default its own projections of one state per position."""
        return attention.project(states, positions)

    def slot_inputs(self, embeddings: Float[Tensor, "B N K H"], context: ContextState) -> Float[Tensor, "B N K H"]:
        """What the slots are fed; by default the embeddings of their tokens, unchanged."""
        return embeddings

    def join(self, embeddings: Float[Tensor, "*rows H"], states: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows H"]:
        """A token's embedding and a feature state as one input; only where ``provides`` says so."""
        raise NotImplementedError(f"{self.name} joins nothing")

    def prepare(
        self, features: TargetFeatures, position_ids: Int[Tensor, "B S"], layout: BlockLayout, lm: LanguageHead
    ) -> ContextState:
        return TrainingRows(self, self.rows(features, lm), position_ids, layout)

    def make_cache(
        self, config: DraftConfig, *, batch_size: int, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        cache = super().make_cache(config, batch_size=batch_size, num_rows=num_rows, dtype=dtype, device=device)
        if self.keeps_boundary:
            cache[BOUNDARY] = torch.zeros(batch_size, config.hidden_size, dtype=dtype, device=device)
        return cache

    def extend(
        self,
        features: TargetFeatures,
        first: Int[Tensor, " B"],
        keep: Int[Tensor, " B"],
        cache: dict[str, Tensor],
        lm: LanguageHead,
    ) -> ContextState:
        rows = self.rows(features, lm)
        if rows.boundary is not None:
            _keep_boundary(rows.boundary, first, keep, cache[BOUNDARY])
        return DecodingRows(self, rows.states, first, first + keep, cache)


def _keep_boundary(
    new: Float[Tensor, "B R C"], first: Int[Tensor, " B"], keep: Int[Tensor, " B"], kept: Float[Tensor, "B C"]
) -> None:
    """Move ``kept`` to the last of the rows that count. Where none is new it stays; where there is none yet it is 0.

    So the first block after a prompt, whose call brings no rows, reads the prompt's last row, and a new batch never
    reads the one before.
    """
    last = new[torch.arange(len(keep), device=keep.device), (keep - 1).clamp(min=0)]
    before = torch.where((first > 0)[:, None], kept, 0.0)
    kept.copy_(torch.where((keep > 0)[:, None], last.to(kept.dtype), before))


@dataclass
class TrainingRows(ContextState):
    """All context of a batch; blocks see the intervals of their layout."""

    part: RowConditioning
    rows: Rows
    position_ids: Int[Tensor, "B S"]
    layout: BlockLayout
    masks: dict[Any, Any] = field(default_factory=dict)

    def sources(self, layer: int, attention: ContextAttention) -> list[KVSource]:
        k, v = self.part.keys_and_values(layer, self.rows.states, self.position_ids, attention)
        layout = self.layout
        return [KVSource(k, v, layout.context_start, layout.context_end, layout.anchors, self.masks)]

    def slot_inputs(self, embeddings: Float[Tensor, "B N K H"]) -> Float[Tensor, "B N K H"]:
        return self.part.slot_inputs(embeddings, self)

    def join(self, embeddings: Float[Tensor, "B W H"], states: Float[Tensor, "B W C"]) -> Float[Tensor, "B W H"]:
        return self.part.join(embeddings, states)

    def boundary(self) -> Float[Tensor, "B N C"]:
        rows, layout = self.rows.boundary, self.layout
        if rows is None:
            return super().boundary()
        last = rows.gather(1, (layout.context_end - 1).clamp(min=0)[..., None].expand(-1, -1, rows.shape[-1]))
        return torch.where((layout.context_end > layout.context_start)[..., None], last, 0.0)


@dataclass
class DecodingRows(ContextState):
    """New rows at positions ``first ..`` beside those that the cache holds; one block per row, at ``end``."""

    part: RowConditioning
    states: Float[Tensor, "B R *state"]
    first: Int[Tensor, " B"]
    end: Int[Tensor, " B"]
    cache: dict[str, Tensor]

    def sources(self, layer: int, attention: ContextAttention) -> list[KVSource]:
        positions = self.first[:, None] + torch.arange(self.states.shape[1], device=self.first.device)
        k, v = self.part.keys_and_values(layer, self.states, positions, attention)
        keys, values = write_kv(self.cache, layer, positions, k, v)
        end = self.end[:, None]
        return [KVSource(keys, values, torch.zeros_like(end), end, end)]

    def slot_inputs(self, embeddings: Float[Tensor, "B N K H"]) -> Float[Tensor, "B N K H"]:
        return self.part.slot_inputs(embeddings, self)

    def join(self, embeddings: Float[Tensor, "B W H"], states: Float[Tensor, "B W C"]) -> Float[Tensor, "B W H"]:
        return self.part.join(embeddings, states)

    def boundary(self) -> Float[Tensor, "B N C"]:
        return self.cache[BOUNDARY][:, None] if BOUNDARY in self.cache else super().boundary()
