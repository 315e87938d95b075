"""Documents' layouts merged into batches, and the counts losses are divided by."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_lightning.block import Anchored, check_layout, count_slots, merge_layouts
from dflash_lightning.types import Alignment, BlockLayout, Document, LabelLayout, SlotTotals

MASK = 99


def make_document(length: int, sample_id: int, *, holes: bool = True) -> Document:
    generator = torch.Generator().manual_seed(sample_id)
    mask = torch.rand(length, generator=generator) < 0.7 if holes else torch.ones(length, dtype=torch.bool)
    return Document(sample_id, torch.randint(0, 90, (length,), generator=generator), mask)


def make_batch(
    lengths: list[list[int]], *, num_blocks: int, label_layout: LabelLayout = "same_position", num_anchors: int = 5
) -> tuple[BlockLayout, list[list[BlockLayout]], Tensor]:
    """The merged layout, the layouts it was made from, and the ids of the rows (padded with 0)."""
    alignment = Alignment(4, MASK, label_layout)
    block = Anchored(block_size=4, num_anchors=num_anchors, label_layout=label_layout)
    vocabulary = torch.arange(100) % 5 != 0
    input_ids = torch.zeros(len(lengths), max(map(sum, lengths)) + 3, dtype=torch.long)
    placed: list[list[tuple[int, BlockLayout]]] = []
    for b, row in enumerate(lengths):
        offset = 0
        placed.append([])
        for m, length in enumerate(row):
            document = make_document(length, 10 * b + m)
            layout = block.blocks(document, alignment, seed=0, epoch=0, vocabulary=vocabulary)
            placed[b].append((offset, layout))
            input_ids[b, offset : offset + length] = document.input_ids
            offset += length
    merged = merge_layouts(placed, num_blocks=num_blocks, alignment=alignment)
    return merged, [[layout for _, layout in row] for row in placed], input_ids


@pytest.mark.parametrize("label_layout", ["same_position", "anchor_first"])
def test_blocks_of_packed_documents_are_each_document_s_own_blocks_moved(label_layout: LabelLayout) -> None:
    lengths = [[12, 9, 20], [15]]
    merged, parts, input_ids = make_batch(lengths, num_blocks=20, label_layout=label_layout)
    check_layout(merged, input_ids, Alignment(4, MASK, label_layout))
    for b, row in enumerate(parts):
        n = offset = 0
        for length, part in zip(lengths[b], row, strict=True):
            blocks = slice(n, n + part.anchors.shape[1])
            for name in ("input_ids", "position_ids", "predicts", "labels", "prev_ids", "scored", "valid", "keep"):
                assert torch.equal(getattr(merged, name)[b, blocks], getattr(part, name)[0]), name
            for name in ("anchors", "context_start", "context_end", "label_index"):
                assert torch.equal(getattr(merged, name)[b, blocks], getattr(part, name)[0] + offset), name
            assert (merged.context_start[b, blocks] == offset).all()
            n, offset = blocks.stop, offset + length
        assert n > 0 and merged.keep[b].tolist() == [True] * n + [False] * (20 - n)
    assert merged.valid.sum() < merged.scored.sum() == len(merged.rows)


def test_padding_blocks_hold_masks_and_see_and_predict_nothing() -> None:
    merged, parts, _ = make_batch([[12], [30, 30]], num_blocks=16)
    real = parts[0][0].anchors.shape[1]
    padding = merged.input_ids[0, real:]
    assert 0 < real < 16 and (padding == MASK).all()
    for name in ("position_ids", "context_start", "context_end", "label_index", "labels", "prev_ids"):
        assert (getattr(merged, name)[0, real:] == 0).all(), name
    for name in ("keep", "predicts", "scored", "valid"):
        assert not getattr(merged, name)[0, real:].any(), name
    assert (merged.anchors[0, real:] == merged.anchors[0, real - 1]).all()
    assert (merged.anchors[:, 1:] >= merged.anchors[:, :-1]).all()


def test_rows_are_the_scored_slots_of_the_whole_batch() -> None:
    merged, _, _ = make_batch([[12, 9], [], [15]], num_blocks=12)
    assert merged.scored.flatten()[merged.rows].all() and len(merged.rows) == merged.scored.sum() > 0
    assert (merged.rows[1:] > merged.rows[:-1]).all()
    assert merged.predicting is not None and len(merged.predicting) > len(merged.rows)
    assert torch.equal(merged.predicting, merged.predicts.flatten().nonzero()[:, 0])


@pytest.mark.parametrize("rows", [[[]], [[], []]])
def test_a_batch_without_documents_is_all_padding(rows: list[list[tuple[int, BlockLayout]]]) -> None:
    merged = merge_layouts(rows, num_blocks=8, alignment=Alignment(4, MASK))
    assert merged.input_ids.shape == (len(rows), 8, 4) and (merged.input_ids == MASK).all()
    assert not merged.keep.any() and len(merged.rows) == 0


def test_documents_without_blocks_take_no_room() -> None:
    alignment = Alignment(4, MASK)
    block = Anchored(block_size=4, num_anchors=5)
    empty = block.blocks(Document(0, torch.arange(3), torch.zeros(3, dtype=torch.bool)), alignment, seed=0, epoch=0)
    full = block.blocks(make_document(20, 1, holes=False), alignment, seed=0, epoch=0)
    merged = merge_layouts([[(0, empty), (3, full)]], num_blocks=5, alignment=alignment)
    assert merged.keep.all() and torch.equal(merged.anchors, full.anchors + 3)
    assert [count_slots(part).documents.item() for part in (empty, full)] == [0, 1]


def test_streams_are_carried_along() -> None:
    alignment = Alignment(4, MASK)
    block = Anchored(block_size=4, num_anchors=5)
    parts = [block.blocks(make_document(20, i, holes=False), alignment, seed=0, epoch=0) for i in range(2)]
    for i, part in enumerate(parts):
        part.streams["noise"] = torch.full((1, 5, 4), float(i + 1))
    merged = merge_layouts([[(0, parts[0]), (20, parts[1])]], num_blocks=11, alignment=alignment)
    assert merged.streams["noise"][0, :, 0].tolist() == [1.0] * 5 + [2.0] * 5 + [0.0]


def test_what_cannot_be_merged_is_refused() -> None:
    alignment = Alignment(4, MASK)
    part = Anchored(block_size=4).blocks(make_document(20, 1, holes=False), alignment, seed=0, epoch=0)
    with pytest.raises(AssertionError, match="19 blocks do not fit a row of 18"):
        merge_layouts([[(0, part)]], num_blocks=18, alignment=alignment)
    with pytest.raises(AssertionError, match="offsets must rise"):
        merge_layouts([[(20, part), (0, part)]], num_blocks=40, alignment=alignment)


def count_slowly(layout: BlockLayout) -> SlotTotals:
    """One slot of one document at a time."""
    size = layout.valid.shape[2]
    totals = SlotTotals.zeros(size)
    for n in range(layout.valid.shape[1]):
        order, unbroken = 0, True
        for k in range(size):
            if layout.predicts[0, n, k]:
                unbroken &= bool(layout.valid[0, n, k])
                totals.valid[order] += layout.valid[0, n, k]
                totals.prefix_valid[order] += layout.valid[0, n, k] and unbroken
                order += 1
        totals.blocks += layout.valid[0, n].any()
    totals.documents += layout.valid.any()
    return totals


@pytest.mark.parametrize("label_layout", ["same_position", "anchor_first"])
def test_counts_equal_a_loop_over_the_slots_of_every_document(label_layout: LabelLayout) -> None:
    merged, parts, _ = make_batch([[12, 9, 20], [15], []], num_blocks=20, label_layout=label_layout)
    alignment, totals = Alignment(4, MASK, label_layout), SlotTotals.zeros(4)
    for part in (part for row in parts for part in row):
        counted, size = count_slots(part), alignment.num_drafts
        assert torch.equal(counted.pack(), count_slowly(part).pack())
        assert torch.equal(count_slots(part, size).valid, counted.valid[:size]) and not counted.valid[size:].any()
        totals = totals + counted
    assert totals.valid.sum() == merged.valid.sum() and totals.blocks == merged.valid.any(-1).sum()
    assert totals.documents == 4 and totals.prefix_valid.sum() < totals.valid.sum()


def test_l4_slots_are_counted_by_their_order_among_predicting_ones() -> None:
    """Blocks of which any slots predict: the weight of the loss and its count then mean the same slot."""
    _, parts, _ = make_batch([[20]], num_blocks=5)
    layout = parts[0][0]
    patterns = torch.tensor([[1, 1, 0, 1], [0, 0, 1, 1], [1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]])
    layout.predicts = patterns.bool()[None, : layout.predicts.shape[1]]
    layout.scored = layout.valid = layout.predicts
    totals = count_slots(layout)
    assert totals.valid.tolist() == [4, 3, 1, 0] == totals.prefix_valid.tolist()
    assert torch.equal(totals.pack(), count_slowly(layout).pack())
    with pytest.raises(AssertionError, match="more than 2 predicting slots"):
        count_slots(layout, 2)


def test_l5_a_document_is_counted_once_wherever_the_context_of_its_blocks_starts() -> None:
    """Blocks that see a window of the context only are still one document's."""
    _, parts, _ = make_batch([[20]], num_blocks=5)
    layout = parts[0][0]
    before = count_slots(layout)
    layout.context_start = (layout.context_end - 2).clamp(min=0)
    assert len(layout.context_start.unique()) > 2
    assert count_slots(layout).documents == before.documents == 1


def test_a_block_counts_only_with_a_valid_slot() -> None:
    alignment = Alignment(4, MASK)
    nothing = torch.zeros(100, dtype=torch.bool)
    part = Anchored(block_size=4).blocks(
        make_document(20, 1, holes=False), alignment, seed=0, epoch=0, vocabulary=nothing
    )
    assert len(part.rows) > 0 and count_slots(part).pack().abs().max() == 0


def test_no_call_is_made_per_block_or_per_token() -> None:
    """Collate lays out every document of every batch: 0.6 ms for 512 tokens and 64 blocks, where a loop takes 50."""
    few, many = (_calls_of_laying_out(*size) for size in ((64, 8), (512, 128)))
    assert few > 50 and many < 1.2 * few


def _calls_of_laying_out(length: int, num_anchors: int) -> int:
    document, alignment = make_document(length, 3), Alignment(8, MASK)
    block = Anchored(block_size=8, num_anchors=num_anchors)

    def lay_out(epoch: int) -> None:
        layout = block.blocks(document, alignment, seed=0, epoch=epoch)
        assert layout.anchors.shape[1] == num_anchors
        merge_layouts([[(0, layout)]], num_blocks=num_anchors, alignment=alignment)
        count_slots(layout)

    lay_out(0)  # what is remembered by shape is remembered now
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        lay_out(1)
    finally:
        sys.setprofile(None)
    return calls
