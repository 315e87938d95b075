"""Documents in memory: ids and masks of a whole data set, and of a single document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_lightning.types import Document


@dataclass(frozen=True)
class MaskedIds:
    """Ids of one document and which of them are supervised."""

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]

    @classmethod
    def of(cls, ids: Sequence[int], mask: Sequence[int]) -> MaskedIds:
        """The same as arrays of one entry per token."""
        return cls(np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=np.bool_))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def anchors(self) -> int:
        """Places where a block can start: supervised tokens with a supervised successor."""
        return int(np.count_nonzero(self.mask[:-1] & self.mask[1:]))

    def first(self, length: int) -> MaskedIds:
        """Itself where it is no longer than ``length``, else its beginning."""
        return self if len(self) <= length else MaskedIds(self.ids[:length], self.mask[:length])


class DocumentStore:
    """Ids and masks of all documents in two flat arrays: small to fork, cheap to pickle, and nothing of the target."""

    def __init__(self, offsets: NDArray[np.int64], ids: NDArray[np.int32], mask: NDArray[np.bool_]) -> None:
        """Document ``d`` is ``ids[offsets[d] : offsets[d + 1]]``; the arrays may be mapped from files."""
        self.offsets = offsets
        self.ids = ids
        self.mask = mask

    @classmethod
    def join(cls, documents: Sequence[MaskedIds]) -> DocumentStore:
        """The store of single documents."""
        offsets = np.zeros(len(documents) + 1, dtype=np.int64)
        np.cumsum([len(document) for document in documents], out=offsets[1:])
        ids, masks = [document.ids for document in documents], [document.mask for document in documents]
        return cls(offsets, np.concatenate(ids), np.concatenate(masks))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, sample_id: int) -> Document:
        start, end = self.offsets[sample_id], self.offsets[sample_id + 1]
        ids = torch.from_numpy(self.ids[start:end].astype(np.int64))
        return Document(sample_id, ids, torch.from_numpy(self.mask[start:end].copy()))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every document."""
        return np.diff(self.offsets)

    def used_ids(self, *, labels_only: bool = False) -> dict[int, int]:
        """Ids that occur anywhere in the documents, or among their supervised tokens, with how often."""
        ids, counts = np.unique(self.ids[self.mask] if labels_only else self.ids, return_counts=True)
        return dict(zip(ids.tolist(), counts.tolist(), strict=True))
