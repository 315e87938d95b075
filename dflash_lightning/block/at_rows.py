"""Blocks at given rows of a batch, made where the batch is: for anchors that are known only while training."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from dflash_lightning.types import Alignment, BlockLayout, SlotTotals, TrainBatch


def lay_out_at(
    batch: TrainBatch, anchors: Int[Tensor, "B N"], alignment: Alignment, vocabulary: Int[Tensor, " v"] | None = None
) -> BlockLayout:
    """The batch's blocks with anchors moved to rows ``anchors``, each within its document; padding blocks stay.

    The blocks are those that ``Anchored`` makes. ``vocabulary`` are the sorted ids that a reduced draft vocabulary can
    express; null means all.

    Args:
        anchors: sorted within a row as ``batch.layout`` has them, padding blocks last.
    """
    old, length = batch.layout, batch.input_ids.shape[1]
    keep, slots = old.keep[..., None], torch.arange(alignment.block_size, device=anchors.device)
    wanted = anchors[..., None] + slots + alignment.shift
    found = _at(batch.doc_ids, wanted.clamp(max=length - 1)) == _at(batch.doc_ids, anchors)[..., None]
    inside = keep & found & (wanted < length)
    # Behind the document's end: its last row, which no slot is scored at.
    label_index = torch.where(inside, wanted, torch.where(inside, wanted, anchors[..., None]).amax(-1, keepdim=True))
    labels = _at(batch.input_ids, label_index)
    predicts = keep & (slots >= alignment.first_slot)
    scored = predicts & inside & _at(batch.loss_mask, label_index)
    valid = scored if vocabulary is None else scored & torch.isin(labels, vocabulary)
    input_ids = torch.full_like(labels, alignment.mask_token_id)
    input_ids[..., 0] = torch.where(old.keep, _at(batch.input_ids, anchors), input_ids[..., 0])
    return replace(
        old,
        anchors=torch.where(old.keep, anchors, 0).cummax(1).values,
        context_end=torch.where(old.keep, anchors, 0),
        input_ids=input_ids,
        position_ids=torch.where(keep, _at(batch.position_ids, anchors)[..., None] + slots, 0),
        predicts=predicts,
        label_index=torch.where(keep, label_index, 0),
        labels=torch.where(keep, labels, 0),
        prev_ids=torch.where(keep, _at(batch.input_ids, (label_index - 1).clamp(min=0)), 0),
        scored=scored,
        valid=valid,
        rows=scored.flatten().nonzero().squeeze(1),
    )


def count_batch(layout: BlockLayout, doc_ids: Int[Tensor, "B S"], num_predicting: int) -> SlotTotals:
    """Counts of the valid slots of a whole batch, as ``count_slots`` summed over its documents."""
    valid = layout.valid
    prefix = (valid | ~layout.predicts).cumprod(-1).bool() & valid
    order = layout.predicts.cumsum(-1) - 1
    every, first = (torch.bincount(order[which], minlength=num_predicting).float() for which in (valid, prefix))
    used = valid.any(-1)
    documents = _at(doc_ids, layout.anchors) + torch.arange(len(doc_ids), device=doc_ids.device)[:, None] * (
        doc_ids.shape[1] + 1
    )
    return SlotTotals(every, first, used.sum().float(), documents[used].unique().numel() * torch.ones_like(every[0]))


def _at(values: Shaped[Tensor, "B S"], rows: Int[Tensor, "B N *slots"]) -> Shaped[Tensor, "B N *slots"]:
    return values.gather(1, rows.flatten(1)).view(rows.shape)
