"""Which documents share a row, and in which order rows are trained on: a pure function of (seed, epoch)."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Pack = tuple[int, ...]  # documents of one row
MicroBatch = tuple[Pack, ...]
PACK_CHUNK = 2048  # documents packed longest first; chunks keep time linear and companions random
OPEN_ROWS = 2048  # rows that best-fit may still add to
CHUNK = 64  # micro-batches sorted by length together when nothing is packed


@dataclass(frozen=True)
class PlanSettings:
    """How rows are filled. ``row_blocks`` null means that only tokens are budgeted."""

    seed: int
    packing: bool
    row_tokens: int
    row_blocks: int | None
    rows_per_batch: int


class Planner:
    """The epochs of a data set as micro-batches over all ranks.

    With packing, documents are joined into rows once per seed and the rows are shuffled anew every epoch: so every
    epoch has equally many steps and the same row shapes, which learning-rate schedule, progress bar, resume and
    compiled graphs rely on. Anchors are drawn anew every epoch anyway. Without packing a row is one document and
    micro-batches join documents of similar length.
    """

    def __init__(
        self, documents: Sequence[int], lengths: Sequence[int], blocks: Sequence[int], settings: PlanSettings
    ) -> None:
        """``lengths[i]`` tokens and ``blocks[i]`` blocks belong to the document with number ``documents[i]``."""
        self.settings = settings
        self.documents = np.asarray(documents, dtype=np.int64)
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.blocks = np.asarray(blocks, dtype=np.int64)
        self.packs: list[Pack] = []
        if settings.packing:
            order = _rng(settings.seed, "packs").permutation(len(self.documents))
            packs = pack_best_fit(
                _sort_chunks(order, -self.lengths, PACK_CHUNK),
                self.lengths,
                self.blocks,
                settings.row_tokens,
                settings.row_blocks,
            )
            self.packs = [tuple(int(self.documents[i]) for i in pack) for pack in packs]

    def blocks_forbid_packing(self) -> bool:
        """Whether no two documents share a row because of their blocks, although their tokens would let them."""
        limit, tokens = self.settings.row_blocks, self.settings.row_tokens
        if not self.settings.packing or limit is None or len(self.documents) < 2:
            return False
        return bool(sum(np.sort(self.blocks)[:2]) > limit and sum(np.sort(self.lengths)[:2]) <= tokens)

    @property
    def num_rows(self) -> int:
        """Rows of an epoch, packed where rows are packed."""
        return len(self.packs) if self.settings.packing else len(self.documents)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of every epoch, over all ranks."""
        return -(-self.num_rows // self.settings.rows_per_batch)

    def epoch(self, epoch: int) -> list[MicroBatch]:
        """Micro-batches of ``epoch`` over all ranks, in the order they are trained on."""
        rng = _rng(self.settings.seed, "epoch", epoch)
        rows = self.settings.rows_per_batch
        if self.settings.packing:
            shuffled = [self.packs[i] for i in rng.permutation(len(self.packs))]
            return [tuple(shuffled[i : i + rows]) for i in range(0, len(shuffled), rows)]
        order = _sort_chunks(rng.permutation(len(self.documents)), self.lengths, CHUNK * rows)
        batches = [order[i : i + rows] for i in range(0, len(order), rows)]
        return [tuple((int(self.documents[j]),) for j in batches[i]) for i in rng.permutation(len(batches))]

    def largest_row(self) -> tuple[int, int]:
        """Tokens of the row that has most, and blocks of the row that has most of these."""
        if not self.settings.packing:
            return int(self.lengths.max()), int(self.blocks.max())
        place = {int(document): index for index, document in enumerate(self.documents)}
        rows = [[place[document] for document in pack] for pack in self.packs]
        return max(int(self.lengths[row].sum()) for row in rows), max(int(self.blocks[row].sum()) for row in rows)

    def digest(self) -> str:
        """Identifies the data's shape and the settings: resuming in the middle of an epoch needs the same."""
        text = f"{self.settings}|{self.documents.tolist()}|{self.lengths.tolist()}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _rng(seed: int, *path: str | int) -> np.random.Generator:
    digest = hashlib.sha256("/".join(str(part) for part in (seed, *path)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "little"))


def _sort_chunks(order: NDArray[np.int64], lengths: NDArray[np.int64], chunk: int) -> list[int]:
    """``order``, sorted by length within every ``chunk``: neighbours have similar lengths, far ones stay shuffled."""
    result: list[int] = []
    for start in range(0, len(order), chunk):
        part = order[start : start + chunk]
        result.extend(int(i) for i in part[np.argsort(lengths[part], kind="stable")])
    return result


def pack_best_fit(
    order: Sequence[int],
    lengths: NDArray[np.int64],
    blocks: NDArray[np.int64],
    row_tokens: int,
    row_blocks: int | None,
) -> list[list[int]]:
    """Indices into ``lengths``, grouped into rows of at most ``row_tokens`` tokens and ``row_blocks`` blocks.

    Each document goes to the open row that it fills best. One with more blocks than the budget gets a row of its own.
    """
    packs: list[list[int]] = []
    blocks_left: list[int] = []
    open_rows: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for index in order:
        need, need_blocks = int(lengths[index]), int(blocks[index]) if row_blocks is not None else 0
        assert need <= row_tokens, "documents are cut to the row before they are packed"
        place = bisect_left(open_rows, (need, -1))
        while place < len(open_rows) and blocks_left[open_rows[place][1]] < need_blocks:
            place += 1
        if place < len(open_rows):
            left, row = open_rows.pop(place)
        else:
            left, row = row_tokens, len(packs)
            packs.append([])
            blocks_left.append(row_blocks if row_blocks is not None else 0)
        packs[row].append(index)
        blocks_left[row] -= need_blocks
        if left > need:
            insort(open_rows, (left - need, row))
        if len(open_rows) > OPEN_ROWS:
            open_rows.pop(0)  # the fullest
    return packs


def rank_share(micro_batches: Sequence[MicroBatch], rank: int, world: int) -> list[MicroBatch]:
    """Micro-batches of ``rank``: every ``world``-th, filled up with empty ones so that all ranks have equally many."""
    padded = list(micro_batches) + [()] * (-len(micro_batches) % world)
    return padded[rank::world]


def window_bounds(length: int, accumulate: int, limit: int) -> list[tuple[int, int]]:
    """First and last-plus-one micro-batch of every accumulation window of an epoch of ``length`` micro-batches.

    Lightning steps after every ``accumulate`` micro-batches and after the last one it runs, which is ``limit`` where
    ``limit_train_batches`` cuts the epoch.
    """
    cuts = sorted({*range(0, length, accumulate), min(limit, length), length})
    return list(pairwise(cuts))
