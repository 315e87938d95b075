"""Target features of a whole data set, computed once, for recipes that repeat it: the contract, and those in memory."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_lightning.data.read.store import DocumentStore
from dflash_lightning.errors import SettingError
from dflash_lightning.progress import Progress
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import FeatureSpec, TargetFeatures, TrainBatch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FixedRow = tuple[int, int]  # first document and last document plus one
ReadRows = Callable[[DocumentStore, Sequence[FixedRow]], Iterator[TargetFeatures]]


@dataclass(frozen=True)
class Storage:
    """How features are kept: which, how wide, and in which dtype.

    ``dtype`` is that of the hidden states which the drafter reads. ``last_hidden`` teaches it, and is kept in
    ``exact``, the target's own dtype: rounding it would change what is learnt.
    """

    spec: FeatureSpec
    width: int
    dtype: torch.dtype
    exact: torch.dtype
    kv: tuple[int, int] = (0, 0)  # key-value heads and their size

    @classmethod
    def of(cls, target: FrozenTarget, spec: FeatureSpec, dtype: torch.dtype) -> Storage:
        """What is kept of ``spec`` of ``target`` in ``dtype``."""
        facts = target.facts
        return cls(spec, facts.hidden_size, dtype, target.dtype, (facts.num_kv_heads, facts.head_dim))

    def room(self, rows: int, positions: int) -> TargetFeatures:
        """Room for ``rows`` x ``positions`` of features, not initialised; without tokens, which documents have."""
        return TargetFeatures.empty(
            self.spec, (rows, positions), self.width, dtype=self.dtype, last_dtype=self.exact, kv=self.kv
        )

    def bytes(self, positions: int) -> int:
        """Memory, or room on a disk, that features of so many positions take."""
        of_layers = len(self.spec.layer_ids) * self.dtype.itemsize
        of_keys = 2 * len(self.spec.kv_ids) * self.kv[0] * self.kv[1] * self.dtype.itemsize
        return positions * (self.width * (of_layers + self.spec.last_hidden * self.exact.itemsize) + of_keys)


class FeatureCache(ABC):
    """Features of every position of every document, gathered by sample id; where they lie is a subclass's business.

    They are computed in document order from fixed rows (see ``fixed_rows``), never from training batches: features of
    packed and single documents differ by about 3e-5, so what is trained on would otherwise depend on where a run was
    resumed. In the target's own dtype they are exactly what the target gives for those rows; hidden states stored as
    bfloat16 are within 2^-8 of it, relative to each value, as float16 within 2^-11.

    ``asked`` is what batches get of that: all of it, unless ``ask`` says less.
    """

    def __init__(self, store: DocumentStore, storage: Storage) -> None:
        self.store = store
        self.storage = storage
        self.asked = storage.spec

    @property
    def spec(self) -> FeatureSpec:
        """The features that are kept."""
        return self.storage.spec

    def ask(self, spec: FeatureSpec) -> FeatureCache:
        """Gather only ``spec`` from now on, a part of what is kept."""
        assert spec | self.spec == self.spec, "only what is kept can be asked for"
        self.asked = spec
        return self

    def expect(self, numbers: Iterable[int]) -> None:  # noqa: B027
        """Hear which documents will be asked for, in that order, before an epoch or the rest of one."""

    def close(self) -> None:  # noqa: B027
        """Hear that nothing more will be asked for."""

    @abstractmethod
    def document(self, number: int) -> TargetFeatures:
        """Features of one document (B = 1), without its tokens, as views of what is stored: not to be written to."""

    def gather(self, batch: TrainBatch) -> TargetFeatures:
        """Features of a batch that is still on the CPU, as they are stored; padding holds zeros."""
        found = replace(self.storage, spec=self.asked).room(*batch.input_ids.shape)
        used = (batch.doc_ids >= 0).sum(1).tolist()
        for row, samples in enumerate(batch.sample_ids.tolist()):
            one, start = found.map(lambda x, row=row: x[row : row + 1]), 0  # type: ignore[misc]
            for sample in samples:
                if sample >= 0:
                    start = write_rows(one, start, self.document(sample))
            assert start == used[row], "documents of a row stand one after the other"
            one.rows(start, batch.input_ids.shape[1]).map(torch.Tensor.zero_)
        return replace(found, ids=batch.input_ids)


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
        read: ReadRows | None = None,
    ) -> None:
        """``row_tokens`` null takes every document through the target by itself; ``read`` null means this target."""
        super().__init__(store, Storage.of(target, spec, dtype))
        total = int(store.offsets[-1])
        self.features = self.storage.room(1, total)
        with Progress("target features", total, unit="tokens", shown=progress) as bar:
            rows = fixed_rows(store, row_tokens)
            compute_features(store, target, rows, self.features, advance=bar.update, read=read)

    def document(self, number: int) -> TargetFeatures:
        return self.features.rows(*self.store.offsets[number : number + 2].tolist())


def compute_features(
    store: DocumentStore,
    target: FrozenTarget,
    rows: Sequence[FixedRow],
    room: TargetFeatures,
    *,
    advance: Callable[[int], Any],
    read: ReadRows | None = None,
) -> None:
    """Write the features of neighbouring fixed rows into ``room`` [1, S], which they fill.

    The target computes them, unless ``read`` says who else does. ``advance`` hears how many positions every row had.
    """
    spec = FeatureSpec(room.layer_ids, room.last_hidden is not None, room.kv_ids)
    start = 0
    for features in read_rows(store, target, rows, spec) if read is None else read(store, rows):
        if room.hidden.dtype == torch.float16:
            check_range(features.hidden)
        begin, start = start, write_rows(room, start, features)
        advance(start - begin)
    assert start == room.hidden.shape[1], "rows cover the room for them"


def read_rows(
    store: DocumentStore, target: FrozenTarget, rows: Sequence[FixedRow], spec: FeatureSpec
) -> Iterator[TargetFeatures]:
    """What the target computes for every row."""
    for first, last in rows:
        begin, end = store.offsets[first], store.offsets[last]
        ids = torch.from_numpy(store.ids[begin:end]).long()[None]
        positions = torch.cat([torch.arange(length) for length in store.lengths[first:last].tolist()])[None]
        yield target.features(ids, positions, spec, packed=last - first > 1)


def check_range(hidden: Float[Tensor, "B S T H"]) -> None:
    """Refuse float16 for the few dimensions with huge values that some targets have: it would hold infinities there."""
    largest = float(hidden.abs().max()) if hidden.numel() else 0.0
    if largest > torch.finfo(torch.float16).max:
        raise SettingError(
            "data.cache_dtype",
            f"'float16' cannot hold this target's features, which reach {largest:.0f}",
            do="Use 'bfloat16', or null for the target's own dtype",
        )


def write_rows(room: TargetFeatures, start: int, features: TargetFeatures) -> int:
    """Write ``features`` into ``room`` from row ``start`` on; returns the row after them."""
    end = start + features.hidden.shape[1]
    room.rows(start, end).copy_(features)
    return end


def fixed_rows(store: DocumentStore, row_tokens: int | None) -> list[FixedRow]:
    """Ranges of neighbouring documents that go through the target together; they depend on the documents only."""
    rows, first, tokens = [], 0, 0
    for document, length in enumerate(store.lengths.tolist()):
        if document > first and (row_tokens is None or tokens + length > row_tokens):
            rows.append((first, document))
            first, tokens = document, 0
        tokens += length
    return [*rows, (first, len(store))]


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
    read: ReadRows | None = None,
) -> RamFeatures:
    """Features in memory, after saying how much of it they take.

    Raises:
        ValueError: it is more than the machine has; nothing was computed.
    """
    tokens = int(store.offsets[-1])
    needed = Storage.of(target, spec, dtype).bytes(tokens)
    say(f"data: features of {tokens} tokens take {size_text(needed)} of memory")
    _check_memory(needed)
    return RamFeatures(store, target, spec, row_tokens=row_tokens, dtype=dtype, progress=progress, read=read)


def _check_memory(needed: int) -> None:
    """Refuse a cache larger than the machine's memory before a single feature is computed."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > installed:
        raise SettingError(
            "data.cache_features",
            f"'ram' needs {needed / 2**30:.1f} GiB, but this machine has {installed / 2**30:.1f} GiB",
            do="Use null (features are computed on the fly) or 'disk', a smaller data.cache_dtype, or fewer rows "
            "(data.limit)",
        )
