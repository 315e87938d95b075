"""What draft layers read besides their own block: key-value sources, a batch's context, the cache of a decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.types import BlockLayout


@dataclass
class KVSource:
    """Keys and values shared by the blocks of a batch row, with the interval of rows that each block may see.

    Block ``n`` of row ``b`` sees rows ``start[b, n] <= j < end[b, n]``. Keys are normed and rotated already. A layer
    with a sliding window narrows the interval itself, per slot: row ``j`` is ``slot_row[b, n] + i - j`` positions away
    from slot ``i``, where ``slot_row`` is the row that slot 0 would have. ``end`` is at most S.

    ``masks`` is where attention keeps what it made of these intervals for the other layers of the same step; null where
    every layer makes it anew.
    """

    k: Float[Tensor, "B S Hkv D"]
    v: Float[Tensor, "B S Hkv D"]
    start: Int[Tensor, "B N"]
    end: Int[Tensor, "B N"]
    slot_row: Int[Tensor, "B N"]
    masks: dict[Any, Any] | None = None


# A drafter layer's own way of turning context states [B, R, H] at positions [B, R] into keys and values
# [B, R, Hkv, D], keys normed and rotated.
ContextProjection = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class ContextState(ABC):
    """What the drafter may read of the target, for one batch. Made by a conditioning, read by every draft layer."""

    @abstractmethod
    def sources(self, layer: int, project: ContextProjection) -> list[KVSource]:
        """Keys and values that draft layer ``layer`` attends to besides its own block."""

    def slot_inputs(self, embeddings: Float[Tensor, "B N K H"], layout: BlockLayout) -> Float[Tensor, "B N K H"]:
        """What the slots are fed; by default the embeddings of their tokens, unchanged."""
        return embeddings


@dataclass
class DraftCache:
    """Static buffers of a decoding batch: projected context keys and values of every draft layer.

    Row ``j`` of a sequence holds the context at position ``j``; rows ``< cursor`` are real, the others stale. New rows
    are scattered at ``cursor .. cursor + R - 1`` and the cursor moves by the number kept, so rejected rows are
    overwritten by the next round. The buffers hold ``max_length + R`` rows.
    """

    keys: list[Float[Tensor, "B M Hkv D"]]
    values: list[Float[Tensor, "B M Hkv D"]]
    cursor: Int[Tensor, " B"]

    @classmethod
    def zeros(
        cls, config: DraftConfig, *, batch_size: int, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> DraftCache:
        shape = (batch_size, num_rows, config.num_key_value_heads, config.head_dim)
        layers = range(config.num_hidden_layers)
        keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        values = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        return cls(keys, values, torch.zeros(batch_size, dtype=torch.long, device=device))
