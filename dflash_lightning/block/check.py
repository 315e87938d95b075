"""What must hold of every layout, stated once: an off-by-one label still trains to a plausible loss."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from dflash_lightning.types import Alignment, BlockLayout


def check_layout(layout: BlockLayout, input_ids: Int[Tensor, "B S"], alignment: Alignment) -> None:
    """Assert that labels, previous tokens, anchors and context of ``layout`` agree with the rows they index.

    The target row that teaches a slot is the one before its label, and ``prev_ids`` names the token there: at the first
    predicting slot that is the anchor, in both label layouts.
    """
    keep, scored, first = layout.keep, layout.scored, alignment.first_slot
    slots = torch.arange(layout.input_ids.shape[2])
    batch = torch.arange(len(input_ids))[:, None, None]
    aligned = layout.label_index == layout.anchors[..., None] + slots + alignment.shift
    assert bool((aligned | ~scored).all()), "a label does not stand where its slot predicts"
    assert bool(((input_ids[batch, layout.label_index] == layout.labels) | ~scored).all()), "a label is not its token"
    teacher = (layout.label_index - 1).clamp(min=0)
    assert bool(((input_ids[batch, teacher] == layout.prev_ids) | ~scored).all()), "prev_ids is not the token before"
    anchor_ids = input_ids.gather(1, layout.anchors)
    assert bool(((layout.input_ids[..., 0] == anchor_ids) | ~keep).all()), "slot 0 does not hold the anchor token"
    begins = scored[..., first]
    assert bool(((layout.prev_ids[..., first] == anchor_ids) | ~begins).all()), (
        "the first draft does not follow the anchor"
    )
    assert bool((layout.predicts == (keep[..., None] & (slots >= first))).all()), "predicts and first_slot disagree"
    assert not bool((layout.valid & ~scored).any() or (scored & ~layout.predicts).any()), "valid, scored, predicts nest"
    assert bool((layout.anchors[:, 1:] >= layout.anchors[:, :-1]).all()), "anchors are not sorted"
    assert bool((layout.keep[:, 1:] <= layout.keep[:, :-1]).all()), "padding blocks must come last"
    assert bool(((layout.context_end <= layout.anchors) & (layout.context_start <= layout.context_end)).all())
    assert torch.equal(layout.rows, scored.flatten().nonzero().squeeze(1)), "rows do not list the scored slots"
