"""Blocks at randomly drawn anchors: the anchor token, then mask tokens (DFlash)."""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias, get_args

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dflash_lightning.block.base import BlockConstructor
from dflash_lightning.block.check import check_anchored
from dflash_lightning.errors import SettingError
from dflash_lightning.types import Alignment, BlockLayout, Document, LabelLayout, SlotInputs

Placement: TypeAlias = Literal["random", "tiled"]


class Anchored(BlockConstructor):
    """``num_anchors`` blocks per document, redrawn every epoch (DFlash, arXiv 2602.06036 sec. 4.2).

    ::

        document   0 1 2 3 4 5 6 7 8     anchor 3, block_size 4
        slots            3 M M M         stand at positions 3 4 5 6, read context 0 1 2
        labels             4 5 6         same_position: slot 0 predicts nothing
                         4 5 6 7         anchor_first: every slot predicts its successor

    With ``inputs="tokens"`` slots hold the true tokens of their places, ``3 4 5 6``, for drafters that are run token by
    token. Such blocks need ``anchor_first``: a slot must not hold what it predicts. The context stays ``0 1 2`` for all
    slots, since later features do not exist when the block is drafted. Slots beyond the document's end hold masks.

    With ``placement="tiled"`` blocks start at the first token of every response and each ``block_size`` tokens on, in
    every epoch alike: an ablation. In decoding a block may start anywhere.
    """

    name: ClassVar[str] = "anchored"
    num_anchors: int

    def __init__(
        self,
        *,
        block_size: int = 16,  # slots of a block, the anchor's included
        num_anchors: int = 512,  # blocks drawn per document and epoch
        mask_token_id: int | None = None,  # embedding row fed to slots to be drafted; null chooses an unused one
        label_layout: LabelLayout = "same_position",  # whether slot i predicts its own position or the next one
        inputs: SlotInputs = "masks",  # what slots behind the anchor's hold: masks, or the true tokens
        placement: Placement = "random",  # where blocks start: at random tokens, or side by side
    ) -> None:
        if num_anchors < 1:
            raise SettingError(
                "block.num_anchors",
                f"{num_anchors} would train on nothing",
                "It is the number of blocks drawn per document and epoch: use 1 or more (DFlash uses 512)",
            )
        self.block_size = block_size
        self.num_anchors = num_anchors
        self.mask_token_id = mask_token_id
        self.label_layout = label_layout
        self.inputs = inputs
        self.placement = placement
        if inputs not in get_args(SlotInputs):
            raise SettingError("block.inputs", f"{inputs!r} is unknown", f"Use one of {list(get_args(SlotInputs))}")
        if placement not in get_args(Placement):
            raise SettingError(
                "block.placement", f"{placement!r} is unknown", f"Use one of {list(get_args(Placement))}"
            )
        if inputs == "tokens" and label_layout != "anchor_first":
            raise SettingError(
                "block.inputs",
                f"tokens, but with label_layout {label_layout!r} a slot would be fed the token that it predicts",
                do="Set block.label_layout=anchor_first",
            )

    def eligible_anchors(self, loss_mask: Bool[Tensor, " S"]) -> Int[Tensor, " n"]:
        """Supervised positions whose successor is supervised too.

        The last prompt token is none of them: decoding drafts from the first *generated* token on, whose block has that
        token for an anchor.
        """
        starts = loss_mask[:-1] & loss_mask[1:]
        if self.placement == "tiled":
            starts = starts & tiles(loss_mask, self.block_size)[:-1]
        return starts.nonzero().squeeze(1)

    def blocks(
        self,
        document: Document,
        alignment: Alignment,
        *,
        seed: int,
        epoch: int,
        vocabulary: Bool[Tensor, " V"] | None = None,
    ) -> BlockLayout:
        eligible = self.eligible_anchors(document.loss_mask)
        anchors = draw_sorted(eligible, self.num_anchors, key=(seed, epoch, document.sample_id))
        layout = lay_out(document, anchors, alignment, vocabulary, inputs=self.inputs)
        check_anchored(layout, document.input_ids[None], alignment)
        return layout


def tiles(loss_mask: Bool[Tensor, " S"], size: int) -> Bool[Tensor, " S"]:
    """Every ``size``-th position of each run of supervised tokens, from its first one on."""
    places = torch.arange(len(loss_mask))
    begins = loss_mask & ~torch.nn.functional.pad(loss_mask[:-1], (1, 0))
    since = places - torch.where(begins, places, 0).cummax(0).values if len(places) else places
    return loss_mask & (since % size == 0)


def draw_sorted(candidates: Int[Tensor, " m"], count: int, *, key: tuple[int, int, int]) -> Int[Tensor, " n"]:
    """``min(count, m)`` distinct entries of the sorted ``candidates``, in order, chosen uniformly by ``key`` alone.

    Every candidate gets 64 random bits and the lowest win, so a larger ``count`` keeps what a smaller one chose. Only
    the bit stream of Philox is used, which NumPy keeps stable over versions, unlike ``Generator.choice``.
    """
    if count >= len(candidates):
        return candidates
    ranks = np.random.Philox(np.random.SeedSequence(key)).random_raw(len(candidates))
    chosen = np.sort(np.argsort(ranks, kind="stable")[:count])
    return candidates[torch.from_numpy(chosen)]


def lay_out(
    document: Document,
    anchors: Int[Tensor, " N"],
    alignment: Alignment,
    vocabulary: Bool[Tensor, " V"] | None = None,
    *,
    inputs: SlotInputs = "masks",
) -> BlockLayout:
    """Blocks at the sorted positions ``anchors`` of a document, as ``Anchored`` makes them.

    Slots may stand, and labels fall, beyond the document's end: such slots are not scored. ``inputs`` says what slots
    behind the anchor's hold; beyond the end they hold masks. ``vocabulary`` marks the ids [V] that a reduced draft
    vocabulary can express; null means all.
    """
    ids, length = document.input_ids, len(document.input_ids)
    slots = torch.arange(alignment.block_size)
    positions = anchors[:, None] + slots  # [N, K]
    label_index = positions + alignment.shift
    inside = label_index < length
    label_index = label_index.clamp(max=max(0, length - 1))
    predicts = (slots >= alignment.first_slot).expand_as(positions)
    # The mask is read where the label is, not where the slot stands.
    scored = predicts & inside & document.loss_mask[label_index]
    labels = ids[label_index]
    valid = scored if vocabulary is None else scored & vocabulary[labels]
    input_ids = torch.full_like(positions, alignment.mask_token_id)
    if inputs == "tokens":
        input_ids = torch.where(positions < length, ids[positions.clamp(max=length - 1)], input_ids)
    input_ids[:, 0] = ids[anchors]
    return BlockLayout(
        anchors=anchors[None],
        keep=torch.ones_like(anchors, dtype=torch.bool)[None],
        context_start=torch.zeros_like(anchors)[None],
        # Strictly before the anchor, whose own target feature does not exist yet when the drafter runs.
        context_end=anchors.clone()[None],
        input_ids=input_ids[None],
        position_ids=positions[None],
        predicts=predicts.clone()[None],
        label_index=label_index[None],
        labels=labels[None],
        prev_ids=ids[(label_index - 1).clamp(min=0)][None],
        scored=scored[None],
        valid=valid.clone()[None],
        rows=scored.flatten().nonzero().squeeze(1),
    )
