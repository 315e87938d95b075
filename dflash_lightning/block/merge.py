"""From the layouts of documents to the layout of a batch, and the counts that losses are normalised by."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from dflash_lightning.types import Alignment, BlockLayout, SlotTotals

# Fields that hold row indices and move with the document's place in its row.
_ROW_INDICES = ("anchors", "context_start", "context_end", "label_index")
_BLOCK_FIELDS = (
    *_ROW_INDICES,
    "keep",
    "input_ids",
    "position_ids",
    "predicts",
    "labels",
    "prev_ids",
    "scored",
    "valid",
)


def merge_layouts(
    rows: Sequence[Sequence[tuple[int, BlockLayout]]], *, num_blocks: int, alignment: Alignment
) -> BlockLayout:
    """The layout of a batch: ``rows[b]`` lists (offset, layout) of the documents of row ``b``, by rising offset.

    Every row is padded to ``num_blocks`` blocks. A padding block holds mask tokens at position 0, sees no context,
    predicts nothing, and repeats the row's last anchor, so that anchors stay sorted.
    """
    counts = [sum(layout.anchors.shape[1] for _, layout in row) for row in rows]
    assert max(counts, default=0) <= num_blocks, f"{max(counts)} blocks do not fit a row of {num_blocks}"
    offsets = [[offset for offset, _ in row] for row in rows]
    assert all(row == sorted(set(row)) for row in offsets), "offsets must rise within a row"
    placed = [document for row in rows for document in row]
    shape = (len(rows), num_blocks)
    target = torch.cat([torch.arange(count) + b * num_blocks for b, count in enumerate(counts)])  # [real blocks]
    blank = _padding(shape, alignment)
    if placed:
        sizes = torch.tensor([layout.anchors.shape[1] for _, layout in placed])
        shift = torch.tensor([offset for offset, _ in placed]).repeat_interleave(sizes)
        for name in _BLOCK_FIELDS:
            values = torch.cat([getattr(layout, name)[0] for _, layout in placed])
            if name in _ROW_INDICES:
                values = values + shift.view(-1, *[1] * (values.dim() - 1))
            _scatter(getattr(blank, name), target, values)
        blank.streams = _merge_streams([layout for _, layout in placed], target, shape)
    blank.anchors = blank.anchors.cummax(1).values
    blank.rows = blank.scored.flatten().nonzero().squeeze(1)
    blank.predicting = blank.predicts.flatten().nonzero().squeeze(1)
    return blank


def count_slots(layout: BlockLayout, num_predicting: int | None = None) -> SlotTotals:
    """Counts of the valid slots of *one document's* layout; those of a batch are the sum over its documents.

    ``num_predicting`` is the most predicting slots that a block of this kind has
    (``BlockConstructor.num_predicting``); null makes room for every slot of a block.
    """
    assert len(layout.valid) == 1, "count one document at a time: a merged layout does not tell them apart"
    valid, predicts = layout.valid, layout.predicts
    prefix = (valid | ~predicts).cumprod(-1).bool() & valid
    order = predicts.cumsum(-1) - 1
    size = layout.valid.shape[2] if num_predicting is None else num_predicting
    every, first = (torch.bincount(order[which], minlength=size).float() for which in (valid, prefix))
    assert len(every) == size, f"a block has more than {size} predicting slots"
    used = valid.any(-1).sum().float()
    return SlotTotals(every, first, used, used.clamp(max=1.0))


def _padding(shape: tuple[int, int], alignment: Alignment) -> BlockLayout:
    """A layout of padding blocks only."""
    slots = (*shape, alignment.block_size)
    zeros, no = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
    slot_zeros, slot_no = torch.zeros(slots, dtype=torch.long), torch.zeros(slots, dtype=torch.bool)
    return BlockLayout(
        anchors=zeros,
        keep=no,
        context_start=zeros.clone(),
        context_end=zeros.clone(),
        input_ids=torch.full(slots, alignment.mask_token_id),
        position_ids=slot_zeros,
        predicts=slot_no,
        label_index=slot_zeros.clone(),
        labels=slot_zeros.clone(),
        prev_ids=slot_zeros.clone(),
        scored=slot_no.clone(),
        valid=slot_no.clone(),
        rows=zeros.new_zeros(0),
    )


def _merge_streams(
    layouts: Sequence[BlockLayout], target: Int[Tensor, " n"], shape: tuple[int, int]
) -> dict[str, Tensor]:
    """Streams of all documents, zero in padding blocks; they hold values, never row indices."""
    names = layouts[0].streams.keys()
    assert all(layout.streams.keys() == names for layout in layouts), (
        "documents of one batch must have the same streams"
    )
    merged = {}
    for name in names:
        values = torch.cat([layout.streams[name][0] for layout in layouts])
        merged[name] = values.new_zeros((*shape, *values.shape[1:]))
        _scatter(merged[name], target, values)
    return merged


def _scatter(into: Shaped[Tensor, "B N *rest"], target: Int[Tensor, " n"], values: Shaped[Tensor, n * rest]) -> None:
    into.flatten(0, 1).index_copy_(0, target, values)
