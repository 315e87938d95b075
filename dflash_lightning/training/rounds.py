"""A round of decoding, played on a training batch: where its blocks are next, and what they read of it.

    anchor a     d_1 .. d_D drafted greedily, of which the first A are the data's own tokens
    new anchor   a' = a + A + 1, with the target's states of d_(A+1) .. d_D, at rows a' ..

RECONSTRUCTED (the papers say "parallel draft-verify-draft"): agreement is with the data, so the responses should be the
target's own. The target reads the text once, for its features and for the keys and values that the drafts continue, and
then the rejected drafts only. Where features are kept it still has to read the text up to the last of these blocks,
because kept features come without keys and values.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from jaxtyping import Bool, Float, Int
from lightning.pytorch import Trainer
from torch import Tensor

from dflash_lightning.block import count_batch, lay_out_at
from dflash_lightning.model import DraftModel
from dflash_lightning.ops.lm_head import LanguageHead
from dflash_lightning.target import FrozenTarget, ReadText, branch_features, check_branches
from dflash_lightning.training.requirements import check_accumulation
from dflash_lightning.types import BlockLayout, Carried, FeatureSpec, TargetFeatures, TrainBatch, best_chain

_DRAFTED_AT_ONCE = 512  # slots whose full logits exist at a time
_STRIDES = (0.6180339887498949, 0.41421356237309515)


def begin_rounds(target: FrozenTarget, model: DraftModel, trainer: Trainer) -> FrozenTarget:
    """The target that reads texts and drafts in this run; the data leaves it to the module from now on.

    Raises:
        ValueError: several micro-batches make one step, whose slots nobody can count before they are all drafted; or
            the target cannot read drafts beside a text.
    """
    check_accumulation(model.conditioning, trainer.accumulate_grad_batches)
    check_branches(target)
    leave = getattr(trainer.datamodule, "leave_reading", None)  # type: ignore[attr-defined]
    return target if leave is None else leave()


@torch.no_grad()
def play_round(
    model: DraftModel, target: FrozenTarget, batch: TrainBatch, spec: FeatureSpec, lm: LanguageHead, step: int = 0
) -> TrainBatch:
    """The batch after a round: blocks moved to where it ended, labels and counts to match, and what they carry.

    A share of the documents (``Conditioning.fresh``) plays none: their blocks stay, and cost what they do without
    rounds. Which documents these are changes from step to step. A block also stays where its round ends at a place
    where no block may start. All depends on weights, batch and step alone, so a resumed run plays the same.

    Args:
        spec: features that the batch must have afterwards; they are made here where it has none.
        step: optimizer steps that were made.
    """
    layout, wishes = batch.layout, model.conditioning
    wishes.at_step(step)
    text = ReadText(target, batch.input_ids, batch.position_ids, spec if batch.features is None else None)
    features = batch.features if text.features is None else text.features
    assert features is not None
    plays = layout.keep & ~_fresh(batch, wishes.fresh, step)
    play = plays.any(0).nonzero().flatten()
    some = _blocks(layout, play)
    hidden, drafts = draft_greedily(model, target, replace(batch, layout=some), features, lm)
    accepted = agreement(batch, some, drafts)
    ended = some.anchors + accepted + 1
    played = may_start(batch, some, ended) & plays[:, play]
    tokens = torch.cat([some.input_ids[..., :1], drafts], dim=2)
    # Verified rows: the root, then the drafts. Of these the rejected ones are carried, the first one first.
    first = torch.where(played, accepted + 1, tokens.shape[2])
    last = torch.full_like(first, tokens.shape[2])
    intervals = (some.context_start, some.context_end)
    seen, places = branch_features(text, tokens, intervals, wishes.required(), (first, last))
    recalled = _recalled(hidden, first, last, seen) if wishes.recalls else None
    anchors = layout.anchors.index_copy(1, play, torch.where(played, ended, some.anchors))
    counts = torch.zeros_like(layout.anchors).index_copy(1, play, last - first)
    start = counts.cumsum(1) - counts
    order = torch.where(layout.keep, anchors, batch.input_ids.shape[1]).argsort(dim=1, stable=True)
    carried = Carried(seen, places, start.gather(1, order), (start + counts).gather(1, order), recalled)
    moved = replace(layout, context_start=layout.context_start.gather(1, order))
    batch = replace(batch, features=features, layout=moved, carried=carried)
    batch.layout = lay_out_at(batch, anchors.gather(1, order), model.alignment, lm.ids)
    batch.window_totals = count_batch(batch.layout, batch.doc_ids, model.alignment.num_drafts)
    torch.clear_autocast_cache()  # it keeps weights that were cast without gradients, and would use them for the step
    return batch


def draft_greedily(
    model: DraftModel, target: FrozenTarget, batch: TrainBatch, features: TargetFeatures, lm: LanguageHead
) -> tuple[Float[Tensor, "B N D H"], Int[Tensor, "B N D"]]:
    """What decoding at temperature 0 drafts after every anchor, with nothing carried; and the slots' hidden states."""
    layout = batch.layout
    if not layout.anchors.shape[1]:
        shape = (len(layout.anchors), 0, model.alignment.num_drafts)
        return layout.anchors.new_zeros(*shape, model.config.hidden_size, dtype=model.dtype), layout.anchors.new_zeros(
            shape
        )
    hidden = model.block_hidden(target.embed(layout.input_ids), layout, features, batch.position_ids, lm)
    slots = hidden[:, :, model.alignment.first_slot :]
    roots, states = layout.input_ids[..., 0].flatten(), slots.flatten(0, 1)
    step = max(1, _DRAFTED_AT_ONCE // slots.shape[2])
    drafts = [
        best_chain(model.open(some, some_roots, lm), some_roots)
        for some, some_roots in zip(states.split(step), roots.split(step), strict=True)
    ]
    found = torch.cat(drafts).unflatten(0, slots.shape[:2])
    return slots[:, :, : found.shape[2]], found


def _blocks(layout: BlockLayout, which: Int[Tensor, " n"]) -> BlockLayout:
    """Blocks ``which`` of every row, to draft with; their scored slots are not listed."""
    lists = ("rows", "streams", "predicting")
    cut = {f.name: getattr(layout, f.name)[:, which] for f in fields(layout) if f.name not in lists}
    return replace(layout, **cut, rows=layout.rows[:0], streams={}, predicting=None)


def _recalled(
    hidden: Float[Tensor, "B N D H"], first: Int[Tensor, "B N"], last: Int[Tensor, "B N"], seen: TargetFeatures
) -> Float[Tensor, "B R H"]:
    """Of every carried row the drafter's state from which the token after it was drafted; 0 behind the last draft."""
    ahead = torch.nn.functional.pad(hidden, (0, 0, 0, 1))  # nothing is drafted after the last draft
    index = torch.arange(ahead.shape[2], device=hidden.device)
    chosen = (index >= first[..., None]) & (index < last[..., None])
    found = hidden.new_zeros(*seen.hidden.shape[:2], hidden.shape[-1])
    for row, mine in enumerate(chosen):
        states = ahead[row][mine]
        found[row, : len(states)] = states
    return found


def agreement(batch: TrainBatch, layout: BlockLayout, drafts: Int[Tensor, "B N D"]) -> Int[Tensor, "B N"]:
    """How many drafts of each block are the data's own tokens, up to the first that is none, within its document."""
    anchors = layout.anchors
    rows = anchors[..., None] + 1 + torch.arange(drafts.shape[2], device=drafts.device)
    same = (_rows(batch.input_ids, rows) == drafts) & _same_document(batch, anchors[..., None], rows)
    return same.long().cumprod(-1).sum(-1)


def may_start(batch: TrainBatch, layout: BlockLayout, anchors: Int[Tensor, "B N"]) -> Bool[Tensor, "B N"]:
    """Whether a block of the same document may start there: the token and its successor are supervised."""
    there = layout.keep
    for rows in (anchors, anchors + 1):
        there = there & _same_document(batch, layout.anchors, rows) & _rows(batch.loss_mask, rows)
    return there


def _fresh(batch: TrainBatch, share: float, step: int) -> Bool[Tensor, "B N"]:
    """Whether the document of each block plays no round at this step: two irrational strides fill (0, 1) evenly."""
    document = _rows(batch.doc_ids, batch.layout.context_start).clamp(min=0)
    number = batch.sample_ids.gather(1, document).double()
    return (number * _STRIDES[0] + step * _STRIDES[1]) % 1.0 < share


def _same_document(batch: TrainBatch, anchors: Int[Tensor, "B N *one"], rows: Tensor) -> Tensor:
    inside = rows < batch.doc_ids.shape[1]
    return inside & (_rows(batch.doc_ids, rows) == _rows(batch.doc_ids, anchors))


def _rows(values: Tensor, rows: Tensor) -> Tensor:
    """``values[b, rows[b, ..]]``; a row behind the last means the last."""
    return values.gather(1, rows.clamp(max=values.shape[1] - 1).flatten(1)).view(rows.shape)
