"""What must hold of every layout, stated once: an off-by-one label still trains to a plausible loss."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from dflash_lightning.types import Alignment, BlockLayout


def check_layout(layout: BlockLayout, input_ids: Int[Tensor, "B S"], alignment: Alignment) -> None:
    """Assert that labels, previous tokens, slots and context of ``layout`` agree with the rows they index.

    The target row that teaches a slot is the one before its label, and ``prev_ids`` names the token there. A slot is
    fed the mask token or the true token of its place, and no slot is fed its own label.
    """
    keep, scored, predicts = layout.keep, layout.scored, layout.predicts
    slots = torch.arange(layout.input_ids.shape[2])
    batch = torch.arange(len(input_ids))[:, None, None]
    places = layout.anchors[..., None] + slots
    aligned = layout.label_index == places + alignment.shift
    assert bool((aligned | ~scored).all()), "a label does not stand where its slot predicts"
    assert bool(((input_ids[batch, layout.label_index] == layout.labels) | ~scored).all()), "a label is not its token"
    assert not bool((scored & (layout.label_index < 1)).any()), "a label has no row before it that could teach it"
    teacher = (layout.label_index - 1).clamp(min=0)
    assert bool(((input_ids[batch, teacher] == layout.prev_ids) | ~scored).all()), "prev_ids is not the token before"
    masked = layout.input_ids == alignment.mask_token_id
    true = layout.input_ids == input_ids[batch, places.clamp(max=input_ids.shape[1] - 1)]
    assert bool((masked | true | ~keep[..., None]).all()), "a slot is fed neither the mask nor its place's token"
    assert alignment.shift or not bool((predicts & ~masked).any()), "a slot is fed what it predicts"
    assert not bool((predicts & ~keep[..., None]).any()), "a padding block predicts"
    assert not bool((layout.valid & ~scored).any() or (scored & ~predicts).any()), "valid, scored, predicts nest"
    assert bool((layout.anchors[:, 1:] >= layout.anchors[:, :-1]).all()), "anchors are not sorted"
    assert bool((layout.keep[:, 1:] <= layout.keep[:, :-1]).all()), "padding blocks must come last"
    assert bool(((layout.context_end <= layout.anchors) & (layout.context_start <= layout.context_end)).all())
    assert torch.equal(layout.rows, scored.flatten().nonzero().squeeze(1)), "rows do not list the scored slots"
    if layout.predicting is not None:
        assert torch.equal(layout.predicting, predicts.flatten().nonzero().squeeze(1)), "not the slots that predict"


def check_anchored(layout: BlockLayout, input_ids: Int[Tensor, "B S"], alignment: Alignment) -> None:
    """Assert besides that blocks look as they do in decoding: the anchor's token first, all other slots to be drafted.

    The first predicting slot then follows the anchor, in both label layouts.
    """
    check_layout(layout, input_ids, alignment)
    keep, first = layout.keep, alignment.first_slot
    anchor_ids = input_ids.gather(1, layout.anchors)
    assert bool(((layout.input_ids[..., 0] == anchor_ids) | ~keep).all()), "slot 0 does not hold the anchor token"
    begins = layout.scored[..., first]
    assert bool(((layout.prev_ids[..., first] == anchor_ids) | ~begins).all()), (
        "the first draft does not follow the anchor"
    )
    drafted = torch.arange(layout.input_ids.shape[2]) >= first
    assert bool((layout.predicts == (keep[..., None] & drafted)).all()), "predicts and first_slot disagree"
