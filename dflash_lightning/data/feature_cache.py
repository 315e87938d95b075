"""Target features of a whole data set in main memory, for recipes that repeat a small one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from dflash_lightning.data.documents import DocumentStore
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import FeatureSpec, TargetFeatures, TrainBatch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class FeatureCache:
    """Features of every position of every document, computed once in document order and gathered by sample id.

    It is filled from fixed batches (neighbouring documents joined up to ``row_tokens``, or one by one), never from
    training batches: features of packed and single documents differ by about 3e-5, so what is trained on would
    otherwise depend on where a run was resumed.
    """

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
        self.store = store
        self.spec = spec
        total, width = int(store.offsets[-1]), target.facts.hidden_size
        self.hidden = torch.empty(total, len(spec.layer_ids), width, dtype=dtype)
        self.last_hidden = torch.empty(total, width, dtype=dtype) if spec.last_hidden else None
        with tqdm(total=total, desc="cache features", unit=" tokens", disable=not progress) as bar:
            for first, last in _fixed_rows(store, row_tokens):
                bar.update(self._fill(target, first, last))

    def _fill(self, target: FrozenTarget, first: int, last: int) -> int:
        """Store the features of documents ``first .. last - 1``; returns how many positions these were."""
        start, end = int(self.store.offsets[first]), int(self.store.offsets[last])
        ids = torch.from_numpy(self.store.ids[start:end]).long()[None]
        positions = torch.cat([torch.arange(int(self.store.lengths[d])) for d in range(first, last)])[None]
        features = target.features(ids, positions, self.spec, packed=last - first > 1)
        self.hidden[start:end] = features.hidden[0]
        if self.last_hidden is not None:
            assert features.last_hidden is not None
            self.last_hidden[start:end] = features.last_hidden[0]
        return end - start

    def gather(self, batch: TrainBatch) -> TargetFeatures:
        """Features of a batch that is still on the CPU, in the dtype of the cache; padding holds zeros."""
        index, real = self._index(batch)
        hidden = self.hidden[index].masked_fill_(~real[..., None, None], 0)
        last = None if self.last_hidden is None else self.last_hidden[index].masked_fill_(~real[..., None], 0)
        return TargetFeatures(self.spec.layer_ids, hidden, last)

    def _index(self, batch: TrainBatch) -> tuple[Int[Tensor, "B S"], Tensor]:
        real = batch.doc_ids >= 0
        samples = batch.sample_ids.gather(1, batch.doc_ids.clamp(min=0)).clamp(min=0)
        index = torch.from_numpy(self.store.offsets)[samples] + batch.position_ids
        return torch.where(real, index, 0), real


def _fixed_rows(store: DocumentStore, row_tokens: int | None) -> Iterator[tuple[int, int]]:
    """Ranges of neighbouring documents that go through the target together; they depend on the documents only."""
    first, tokens = 0, 0
    for document, length in enumerate(store.lengths.tolist()):
        if document > first and (row_tokens is None or tokens + length > row_tokens):
            yield first, document
            first, tokens = document, 0
        tokens += length
    yield first, len(store)


def cache_bytes(num_tokens: int, spec: FeatureSpec, hidden_size: int, dtype: torch.dtype) -> int:
    """Memory that the cache will take."""
    return num_tokens * (len(spec.layer_ids) + spec.last_hidden) * hidden_size * dtype.itemsize


def check_memory(needed: int) -> None:
    """Refuse a cache larger than the machine's memory before a single feature is computed."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > installed:
        raise ValueError(
            f"data.cache_features: 'ram' needs {needed / 2**30:.1f} GiB, but this machine has "
            f"{installed / 2**30:.1f} GiB. Use null (features are computed on the fly), a smaller data.cache_dtype, or "
            "fewer rows (data.limit)."
        )
