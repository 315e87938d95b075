"""What draft layers read besides their own block: key-value sources, a batch's context, the cache of a decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass
class KVSource:
    """Keys and values shared by the blocks of a batch row, with the interval of rows that each block may see.

    Block ``n`` of row ``b`` sees rows ``start[b, n] <= j < end[b, n]``. Keys are normed and rotated already. A layer
    with a sliding window narrows the interval itself, per slot: row ``j`` is ``slot_row[b, n] + i - j`` positions away
    from slot ``i``, where ``slot_row`` is the row that slot 0 would have. ``end`` is at most S.

    An interval may be shared by all blocks: then ``start``, ``end`` and ``slot_row`` are [B 1] (``over``).

    ``masks`` is where attention keeps what it made of these intervals for the other layers of the same step; null where
    every layer makes it anew.
    """

    k: Float[Tensor, "B S Hkv D"]
    v: Float[Tensor, "B S Hkv D"]
    start: Int[Tensor, "B N"]
    end: Int[Tensor, "B N"]
    slot_row: Int[Tensor, "B N"]
    masks: dict[Any, Any] | None = None

    def over(self, num_blocks: int, masks: dict[Any, Any] | None) -> KVSource:
        """The source with an interval for every block; one interval [B 1] is that of all blocks.

        ``masks`` keeps what is made of it, so that other layers of the step find the same intervals.

        Raises:
            ValueError: it has intervals for another number of blocks.
        """
        count = self.start.shape[1]
        if count == num_blocks:
            return self
        if count != 1:
            raise ValueError(
                f"KVSource: start, end and slot_row are of {count} blocks, but the layout has {num_blocks}. Give them "
                f"as [B, {num_blocks}], or as [B, 1] where all blocks see the same rows."
            )
        intervals, kept = (self.start, self.end, self.slot_row), replace(self, masks=masks)
        start, end, row = made_once([kept], ("over", num_blocks), lambda: [x.expand(-1, num_blocks) for x in intervals])
        return replace(self, start=start, end=end, slot_row=row)


def made_once(sources: Sequence[KVSource], key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """What attention makes of the intervals of ``sources``: made for the first layer of a step, found by the others.

    ``key`` is what it depends on besides the intervals.
    """
    made = sources[0].masks if sources else None
    if made is None:
        return make()
    intervals = [x for source in sources for x in (source.start, source.end, source.slot_row)]
    key = (*key, *(source.k.shape[1] for source in sources), *map(id, intervals))
    if key not in made:
        # The intervals are kept with it, so that their ids cannot come to mean other tensors.
        made[key] = (make(), intervals)
    return made[key][0]


@runtime_checkable
class ContextAttention(Protocol):
    """What the attention of a draft layer offers to the context that the layer reads."""

    def project(
        self, states: Float[Tensor, "B R H"], positions: Int[Tensor, "B R"]
    ) -> tuple[Float[Tensor, "B R Hkv D"], Float[Tensor, "B R Hkv D"]]:
        """Keys and values of ``states`` by the layer's own projections; keys normed and rotated to ``positions``."""
        ...

    def finish_keys(self, k: Float[Tensor, "B R Hkv D"], positions: Int[Tensor, "B R"]) -> Float[Tensor, "B R Hkv D"]:
        """Keys that a conditioning projected by itself, normed and rotated as the layer's own are."""
        ...


class ContextState(ABC):
    """What the drafter may read of the target, for one batch. Made by a conditioning, read by every draft layer."""

    @abstractmethod
    def sources(self, layer: int, attention: ContextAttention) -> list[KVSource]:
        """Keys and values that draft layer ``layer`` attends to besides its own block; empty where there are none."""

    def slot_inputs(self, embeddings: Float[Tensor, "B N K H"]) -> Float[Tensor, "B N K H"]:
        """What the slots are fed; by default the embeddings of their tokens, unchanged."""
        return embeddings

    def boundary(self) -> Float[Tensor, "B N C"]:
        """State of the last row that each block sees, zeros where it sees none.

        Only for drafters whose ``needs`` name it: a conditioning without ``"boundary"`` in ``provides`` has none.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps no boundary")

    def join(self, embeddings: Float[Tensor, "B W H"], states: Float[Tensor, "B W C"]) -> Float[Tensor, "B W H"]:
        """A token's embedding and a feature state made into one input, as in the context's own rows.

        Only for drafters whose ``needs`` name it: a conditioning without ``"join"`` in ``provides`` has none.
        """
        raise NotImplementedError(f"{type(self).__name__} joins nothing")


@dataclass
class DraftCache:
    """What a decoding batch keeps between rounds, in static buffers.

    ``cursor[b]`` counts the positions of sequence ``b`` that have been taken in; only the model moves it. ``tensors``
    belong to the conditioning, which made them (``Conditioning.make_cache``) and alone knows what they hold.
    """

    cursor: Int[Tensor, " B"]
    tensors: dict[str, Tensor]


def make_kv_cache(
    num_layers: int, shape: tuple[int, int, int, int], *, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Zeros for keys and values of every draft layer; ``shape`` is [B, rows, Hkv, D].

    Row ``j`` of a sequence holds the context at position ``j``; rows from the cursor on are stale.
    """
    names = [f"{what}.{layer}" for layer in range(num_layers) for what in ("keys", "values")]
    return {name: torch.zeros(shape, dtype=dtype, device=device) for name in names}


def write_kv(
    cache: dict[str, Tensor],
    layer: int,
    rows: Int[Tensor, "B R"],
    k: Float[Tensor, "B R Hkv D"],
    v: Float[Tensor, "B R Hkv D"],
) -> tuple[Float[Tensor, "B M Hkv D"], Float[Tensor, "B M Hkv D"]]:
    """Put new keys and values at ``rows`` of the buffers of ``make_kv_cache``; returns the layer's whole buffers."""
    keys, values = cache[f"keys.{layer}"], cache[f"values.{layer}"]
    at = torch.arange(rows.shape[0], device=rows.device)[:, None]
    keys[at, rows] = k.to(keys.dtype)
    values[at, rows] = v.to(values.dtype)
    return keys, values
