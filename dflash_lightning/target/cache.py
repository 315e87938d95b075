"""The key-value cache of a ragged decoding batch, in the shape transformers' decoders expect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_FIRST_CAPACITY = 256


@dataclass
class Place:
    """Where the rows of the next forward go, the same in every layer.

    ``rows`` null stands for ``start .. num_rows - 1`` of every sequence.
    """

    start: int = 0
    num_rows: int = 0
    rows: Int[Tensor, "B W"] | None = None


class RowLayer(CacheLayerMixin):
    """Buffers [B Hkv rows D] of one layer. Its cache decides once per forward where new rows go.

    It knows the place and not the cache: two objects that hold one another are freed by Python's collector only, and
    that may be many batches later.
    """

    is_sliding = False  # all rows are kept and masks do the window, so that any row can be rolled back

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._grown(None, key_states), self._grown(None, value_states)
        self.is_initialized = True

    def update(
        self,
        key_states: Float[Tensor, "B Hkv W D"],
        value_states: Float[Tensor, "B Hkv W Dv"],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "B Hkv J D"], Float[Tensor, "B Hkv J Dv"]]:
        if self.keys is None or self.values is None or self.keys.shape[0] != key_states.shape[0]:
            self.lazy_initialization(key_states, value_states)
        elif self.keys.shape[2] < self._place.num_rows:
            self.keys, self.values = self._grown(self.keys, key_states), self._grown(self.values, value_states)
        assert self.keys is not None and self.values is not None
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        place = self._place
        if place.rows is None:
            buffer[:, :, place.start : place.num_rows] = states
        else:
            batch = torch.arange(len(buffer), device=buffer.device)[:, None]
            buffer.transpose(1, 2)[batch, place.rows] = states.transpose(1, 2)
        return buffer[:, :, : place.num_rows]

    def move(self, source: Int[Tensor, "B P"], target: Int[Tensor, "B P"]) -> None:
        """Copy the keys and values of rows ``source`` to rows ``target``; the two may overlap."""
        for buffer in (self.keys, self.values):
            if buffer is not None:
                shape = (-1, buffer.shape[1], -1, buffer.shape[3])
                moved = buffer.gather(2, source[:, None, :, None].expand(shape))
                buffer.scatter_(2, target[:, None, :, None].expand(shape), moved)

    def _grown(self, buffer: Tensor | None, states: Tensor) -> Tensor:
        """Room for the rows needed now, at least doubled; zeros, because a masked NaN would still poison a sum."""
        batch, heads, _, dim = states.shape
        old = 0 if buffer is None else buffer.shape[2]
        capacity = max(_FIRST_CAPACITY, 2 * old, self._place.num_rows)
        grown = states.new_zeros(batch, heads, capacity, dim)
        if buffer is not None:
            grown[:, :, :old] = buffer
        return grown

    def get_seq_length(self) -> int:
        return self._place.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._place.start + query_length, 0

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """Row ``j < lengths[b]`` of every buffer is position ``j`` of sequence ``b``. The tokens of a forward stand in the
    rows after these, in the order of the forward. So rollback is forgetting: a later write replaces a row.

    ``place`` says, before a forward, where its rows go. With equal lengths the cache looks to transformers like any
    other of ``start`` rows, and transformers makes the masks of chains. With unequal lengths and for token trees the
    caller brings masks (see ``ragged_mask`` and ``tree_mask``).
    """

    def __init__(self, num_layers: int) -> None:
        self._place = Place()
        self._row_layers = [RowLayer(self._place) for _ in range(num_layers)]
        super().__init__(layers=list(self._row_layers))

    def place(self, lengths: list[int], rows: Int[Tensor, "B W"]) -> bool:
        """Aim the next forward at ``rows`` (``lengths[b] ..``); returns whether they are ragged."""
        place = self._place
        place.start = max(lengths)
        place.num_rows = place.start + rows.shape[1]
        ragged = min(lengths) != place.start
        place.rows = rows if ragged else None
        return ragged

    @property
    def num_rows(self) -> int:
        """Rows that the next forward sees, its own included."""
        return self._place.num_rows

    def move(self, source: Int[Tensor, "B P"], target: Int[Tensor, "B P"]) -> None:
        """Copy rows ``source`` of every layer to rows ``target``."""
        for layer in self._row_layers:
            layer.move(source, target)


class TextLayer(CacheLayerMixin):
    """Keys and values of a text in one layer: the first forward leaves them, later ones see them and add nothing."""

    is_sliding = False  # all rows are kept and masks do the window

    def lazy_initialization(
        self, key_states: Float[Tensor, "B Hkv W D"], value_states: Float[Tensor, "B Hkv W Dv"]
    ) -> None:
        self.keys, self.values = key_states, value_states
        self.is_initialized = True

    def update(
        self,
        key_states: Float[Tensor, "B Hkv W D"],
        value_states: Float[Tensor, "B Hkv W Dv"],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "B Hkv J D"], Float[Tensor, "B Hkv J Dv"]]:
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        return torch.cat([self.keys, key_states], dim=2), torch.cat([self.values, value_states], dim=2)

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


def text_cache(num_layers: int) -> Cache:
    """An empty cache of ``TextLayer``s."""
    return Cache(layers=[TextLayer() for _ in range(num_layers)])


def keys_and_values(
    layers: Sequence[Any], ids: Sequence[int], rows: Int[Tensor, "B W"] | None = None
) -> tuple[Float[Tensor, "B W C Hkv D"], Float[Tensor, "B W C Hkv D"]]:
    """What layers ``ids`` of a cache hold, stacked in this order; ``rows`` null: all rows."""

    def of(kept: Float[Tensor, "B Hkv J D"]) -> Float[Tensor, "B W Hkv D"]:
        by_row = kept.transpose(1, 2)
        return by_row if rows is None else by_row[torch.arange(len(rows), device=rows.device)[:, None], rows]

    found = [layers[i] for i in ids]
    return torch.stack([of(x.keys) for x in found], dim=2), torch.stack([of(x.values) for x in found], dim=2)
