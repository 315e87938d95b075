"""Target features of a whole data set, computed once, for recipes that repeat it: the contract, and those in memory."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_lightning.data.read.store import DocumentStore
from dflash_lightning.progress import Progress
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import FeatureSpec, TargetFeatures, TrainBatch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FixedRow = tuple[int, int]  # first document and last document plus one


class FeatureCache(ABC):
    """Features of every position of every document, gathered by sample id; where they lie is a subclass's business.

    They are computed in document order from fixed rows (see ``fixed_rows``), never from training batches: features of
    packed and single documents differ by about 3e-5, so what is trained on would otherwise depend on where a run was
    resumed. In the target's own dtype they are exactly what the target gives for those rows; stored as bfloat16 they
    are within 2^-8 of it, relative to each value, as float16 within 2^-11.
    """

    def __init__(self, store: DocumentStore, spec: FeatureSpec, *, hidden_size: int, dtype: torch.dtype) -> None:
        self.store = store
        self.spec = spec
        self.hidden_size = hidden_size
        self.dtype = dtype

    @abstractmethod
    def document(self, number: int) -> TargetFeatures:
        """Features of one document (B = 1), as views of what is stored: not to be written to."""

    def gather(self, batch: TrainBatch) -> TargetFeatures:
        """Features of a batch that is still on the CPU, in the dtype of the cache; padding holds zeros."""
        shape, width = batch.input_ids.shape, self.hidden_size
        flat, flat_last = empty_features(shape.numel(), self.spec, width, self.dtype)
        hidden = flat.view(*shape, *flat.shape[1:])
        last = None if flat_last is None else flat_last.view(*shape, width)
        used = (batch.doc_ids >= 0).sum(1).tolist()
        for row, samples in enumerate(batch.sample_ids.tolist()):
            start = 0
            for sample in samples:
                if sample >= 0:
                    start = _copy(self.document(sample), hidden[row], None if last is None else last[row], start)
            assert start == used[row], "documents of a row stand one after the other"
            hidden[row, start:] = 0
            if last is not None:
                last[row, start:] = 0
        return TargetFeatures(self.spec.layer_ids, hidden, last)


class RamFeatures(FeatureCache):
    """All features in main memory, computed anew by every process."""

    def __init__(
        self,
        store: DocumentStore,
        target: FrozenTarget,
        spec: FeatureSpec,
        *,
        row_tokens: int | None,
        dtype: torch.dtype,
        progress: bool = False,
    ) -> None:
        """``row_tokens`` null takes every document through the target by itself."""
        width = target.facts.hidden_size
        super().__init__(store, spec, hidden_size=width, dtype=dtype)
        total = int(store.offsets[-1])
        self.hidden, self.last_hidden = empty_features(total, spec, width, dtype)
        with Progress("target features", total, unit="tokens", shown=progress) as bar:
            rows = fixed_rows(store, row_tokens)
            compute_features(store, target, spec, rows, self.hidden, self.last_hidden, advance=bar.update)

    def document(self, number: int) -> TargetFeatures:
        return slice_features(
            self.spec, self.hidden, self.last_hidden, *self.store.offsets[number : number + 2].tolist()
        )


def empty_features(
    tokens: int, spec: FeatureSpec, hidden_size: int, dtype: torch.dtype
) -> tuple[Float[Tensor, "S T H"], Float[Tensor, "S H"] | None]:
    """Room for features of so many positions."""
    hidden = torch.empty(tokens, len(spec.layer_ids), hidden_size, dtype=dtype)
    return hidden, torch.empty(tokens, hidden_size, dtype=dtype) if spec.last_hidden else None


def compute_features(
    store: DocumentStore,
    target: FrozenTarget,
    spec: FeatureSpec,
    rows: Sequence[FixedRow],
    hidden: Float[Tensor, "S T H"],
    last_hidden: Float[Tensor, "S H"] | None,
    *,
    advance: Callable[[int], Any],
) -> None:
    """Take neighbouring fixed rows through the target and write what it gives; ``advance`` hears of every row."""
    start = 0
    for first, last in rows:
        begin, end = store.offsets[first], store.offsets[last]
        ids = torch.from_numpy(store.ids[begin:end]).long()[None]
        positions = torch.cat([torch.arange(length) for length in store.lengths[first:last].tolist()])[None]
        features = target.features(ids, positions, spec, packed=last - first > 1)
        if hidden.dtype == torch.float16:
            _check_range(features)
        advance(_copy(features, hidden, last_hidden, start) - start)
        start += ids.shape[1]
    assert start == len(hidden), "rows cover the room for them"


def _check_range(features: TargetFeatures) -> None:
    """Some targets have a few dimensions with huge values; float16 would hold infinities there."""
    parts = [part for part in (features.hidden, features.last_hidden) if part is not None and part.numel()]
    largest = max(float(part.abs().max()) for part in parts)
    if largest > torch.finfo(torch.float16).max:
        raise ValueError(
            f"data.cache_dtype: 'float16' cannot hold this target's features, which reach {largest:.0f}. "
            "Use 'bfloat16', or null for the target's own dtype."
        )


def _copy(
    features: TargetFeatures, hidden: Float[Tensor, "S T H"], last: Float[Tensor, "S H"] | None, start: int
) -> int:
    """Write one row of features at ``start``; returns the position after it."""
    end = start + features.hidden.shape[1]
    hidden[start:end] = features.hidden[0]
    if last is not None:
        assert features.last_hidden is not None
        last[start:end] = features.last_hidden[0]
    return end


def slice_features(
    spec: FeatureSpec, hidden: Float[Tensor, "S T H"], last: Float[Tensor, "S H"] | None, start: int, end: int
) -> TargetFeatures:
    """Positions ``start .. end - 1`` of flat features as a row of their own, without a copy."""
    return TargetFeatures(spec.layer_ids, hidden[None, start:end], None if last is None else last[None, start:end])


def fixed_rows(store: DocumentStore, row_tokens: int | None) -> list[FixedRow]:
    """Ranges of neighbouring documents that go through the target together; they depend on the documents only."""
    rows, first, tokens = [], 0, 0
    for document, length in enumerate(store.lengths.tolist()):
        if document > first and (row_tokens is None or tokens + length > row_tokens):
            rows.append((first, document))
            first, tokens = document, 0
        tokens += length
    return [*rows, (first, len(store))]


def cache_bytes(num_tokens: int, spec: FeatureSpec, hidden_size: int, dtype: torch.dtype) -> int:
    """Memory, or room on a disk, that features of so many tokens take."""
    return num_tokens * (len(spec.layer_ids) + spec.last_hidden) * hidden_size * dtype.itemsize


def size_text(count: int) -> str:
    """Bytes in words."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def make_in_memory(
    store: DocumentStore,
    target: FrozenTarget,
    spec: FeatureSpec,
    *,
    row_tokens: int | None,
    dtype: torch.dtype,
    say: Callable[[str], None],
    progress: bool,
) -> RamFeatures:
    """Features in memory, after saying how much of it they take.

    Raises:
        ValueError: it is more than the machine has; nothing was computed.
    """
    tokens = int(store.offsets[-1])
    needed = cache_bytes(tokens, spec, target.facts.hidden_size, dtype)
    say(f"data: features of {tokens} tokens take {size_text(needed)} of memory")
    _check_memory(needed)
    return RamFeatures(store, target, spec, row_tokens=row_tokens, dtype=dtype, progress=progress)


def _check_memory(needed: int) -> None:
    """Refuse a cache larger than the machine's memory before a single feature is computed."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > installed:
        raise ValueError(
            f"data.cache_features: 'ram' needs {needed / 2**30:.1f} GiB, but this machine has "
            f"{installed / 2**30:.1f} GiB. Use null (features are computed on the fly) or 'disk', a smaller "
            "data.cache_dtype, or fewer rows (data.limit)."
        )
