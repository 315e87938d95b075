"""Contexts of one row per position: what training and decoding share, whatever a row is made of."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.conditioning.base import Conditioning
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.ops.context import ContextAttention, ContextState, KVSource, write_kv
from dflash_lightning.ops.language_head import LanguageHead
from dflash_lightning.types import BlockLayout, TargetFeatures

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
        if BOUNDARY in self.provides:
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
