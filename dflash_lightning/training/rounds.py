"""A round of decoding, played on a training batch: where its blocks are next, and what they read of it.

    anchor a     d_1 .. d_D drafted greedily, of which the first A are the data's own tokens
    new anchor   a' = a + A + 1, with the target's states of d_(A+1) .. d_D, at rows a' ..

RECONSTRUCTED (the papers say "parallel draft-verify-draft"): agreement is with the data, so the responses should be the
target's own. The target reads the drafts in one forward more, of ``S + N * (D + 1)`` rows: train with few anchors. It
reads the text again with them, because kept features come without the keys and values that this would save.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dflash_lightning.block import count_batch, lay_out_at
from dflash_lightning.model import DraftModel
from dflash_lightning.ops.lm_head import LanguageHead
from dflash_lightning.target import FrozenTarget, branch_features, check_branches
from dflash_lightning.training.requirements import check_accumulation
from dflash_lightning.types import BlockLayout, Carried, FeatureSpec, Scores, TargetFeatures, TrainBatch

_DRAFTED_AT_ONCE = 512  # slots whose full logits exist at a time


def check_rounds(target: FrozenTarget, model: DraftModel, *, accumulated: int) -> None:
    """Refuse a run in which rounds cannot be played, or would be weighted by counts that are not theirs.

    Raises:
        ValueError: several micro-batches make one step, whose slots nobody can count before they are all drafted; or
            the target cannot read drafts beside a text.
    """
    check_accumulation(model.conditioning, accumulated)
    check_branches(target)


@torch.no_grad()
def play_round(
    model: DraftModel, target: FrozenTarget, batch: TrainBatch, spec: FeatureSpec, lm: LanguageHead
) -> TrainBatch:
    """The batch after a round: blocks moved to where it ended, labels and counts to match, and what they carry.

    A share of the blocks (``Conditioning.fresh``, every so manyeth) plays none and stays, and so does a block whose
    round ends where no block may start. Depends on the weights and the batch alone, so a resumed run plays the same.

    Args:
        spec: features that the batch must have afterwards; they are made here where it has none.
    """
    layout, features = batch.layout, batch.features
    if features is None:
        features = target.features(batch.input_ids, batch.position_ids, spec, packed=batch.packed)
    drafts = draft_greedily(model, target, batch, features, lm)
    accepted = agreement(batch, drafts)
    ended = layout.anchors + accepted + 1
    played = may_start(batch, ended) & ~_fresh(layout, model.conditioning.fresh)
    tokens = torch.cat([layout.input_ids[..., :1], drafts], dim=2)
    num_blocks, width = tokens.shape[1:]
    first = torch.arange(num_blocks, device=tokens.device) * width
    start = first + accepted + 1
    end = torch.where(played, first + width, start)
    anchors = torch.where(played, ended, layout.anchors)
    order = torch.where(layout.keep, anchors, batch.input_ids.shape[1]).argsort(dim=1, stable=True)
    intervals = (layout.context_start, layout.context_end)
    seen = branch_features(
        target, batch.input_ids, batch.position_ids, tokens, intervals, model.conditioning.required()
    )
    places = layout.position_ids[..., :1] + torch.arange(width, device=tokens.device)
    carried = Carried(seen, places.flatten(1), start.gather(1, order), end.gather(1, order))
    moved = replace(layout, context_start=layout.context_start.gather(1, order))
    batch = replace(batch, features=features, layout=moved, carried=carried)
    batch.layout = lay_out_at(batch, anchors.gather(1, order), model.alignment, lm.ids)
    batch.window_totals = count_batch(batch.layout, batch.doc_ids, model.alignment.num_drafts)
    torch.clear_autocast_cache()  # it keeps weights that were cast without gradients, and would use them for the step
    return batch


def draft_greedily(
    model: DraftModel, target: FrozenTarget, batch: TrainBatch, features: TargetFeatures, lm: LanguageHead
) -> Int[Tensor, "B N D"]:
    """What decoding at temperature 0 drafts after every anchor, with nothing carried."""
    layout = batch.layout
    hidden = model.block_hidden(target.embed(layout.input_ids), layout, features, batch.position_ids, lm)
    slots = hidden[:, :, model.alignment.first_slot :]
    roots, states = layout.input_ids[..., 0].flatten(), slots.flatten(0, 1)
    step = max(1, _DRAFTED_AT_ONCE // slots.shape[2])
    drafts = [
        best_chain(model.open(some, some_roots, lm), some_roots)
        for some, some_roots in zip(states.split(step), roots.split(step), strict=True)
    ]
    return torch.cat(drafts).unflatten(0, slots.shape[:2])


def best_chain(scores: Scores, roots: Int[Tensor, " B"]) -> Int[Tensor, "B D"]:
    """The likeliest token of every law, each after the ones before it."""
    if scores.step is None:
        return _likeliest(scores)
    state, drafts = scores.state, [roots[:, None]]
    for depth in range(scores.logits.shape[1]):
        law, state = scores.step(state, drafts[-1], depth)
        drafts.append(_likeliest(law))
    return torch.cat(drafts[1:], dim=1)


def _likeliest(scores: Scores) -> Int[Tensor, "B n"]:
    best, ids = scores.logits.argmax(-1), scores.ids
    if ids is None:
        return best
    return ids[best] if ids.ndim == 1 else ids.gather(-1, best[..., None])[..., 0]


def agreement(batch: TrainBatch, drafts: Int[Tensor, "B N D"]) -> Int[Tensor, "B N"]:
    """How many drafts of each block are the data's own tokens, up to the first that is none, within its document."""
    anchors = batch.layout.anchors
    rows = anchors[..., None] + 1 + torch.arange(drafts.shape[2], device=drafts.device)
    same = (_rows(batch.input_ids, rows) == drafts) & _same_document(batch, anchors[..., None], rows)
    return same.long().cumprod(-1).sum(-1)


def may_start(batch: TrainBatch, anchors: Int[Tensor, "B N"]) -> Bool[Tensor, "B N"]:
    """Whether a block of the same document may start there: the token and its successor are supervised."""
    there = batch.layout.keep
    for rows in (anchors, anchors + 1):
        there = there & _same_document(batch, batch.layout.anchors, rows) & _rows(batch.loss_mask, rows)
    return there


def _fresh(layout: BlockLayout, share: float) -> Bool[Tensor, " N"]:
    number = torch.arange(layout.anchors.shape[1], device=layout.anchors.device, dtype=torch.float64)
    return ((number + 1) * share).floor() > (number * share).floor()


def _same_document(batch: TrainBatch, anchors: Int[Tensor, "B N *one"], rows: Tensor) -> Tensor:
    inside = rows < batch.doc_ids.shape[1]
    return inside & (_rows(batch.doc_ids, rows) == _rows(batch.doc_ids, anchors))


def _rows(values: Tensor, rows: Tensor) -> Tensor:
    """``values[b, rows[b, ..]]``; a row behind the last means the last."""
    return values.gather(1, rows.clamp(max=values.shape[1] - 1).flatten(1)).view(rows.shape)
