"""Blocks that begin with true tokens: the law of their number, what slots hold and learn, and what they weigh."""

from __future__ import annotations

import pytest
import torch

from dflash_lightning.block import Anchored, VariablePrefix
from dflash_lightning.block.variable_prefix import prefix_law
from dflash_lightning.loss.base import slot_weights
from dflash_lightning.testing import check_block, toy_document
from dflash_lightning.types import Alignment, Document

ALIGNMENT = Alignment(6, 31, "same_position")


def test_the_published_law_of_lengths() -> None:
    """MT 8: beta .8, 16 slots."""
    law = prefix_law(16, 0.8)
    assert law.shape == (15,) and float(law.sum()) == pytest.approx(1.0)
    assert [round(float(law[i]), 6) for i in (0, 1, 14)] == [0.207293, 0.165835, 0.009117]


def test_slots_behind_the_prefix_weigh_by_their_order() -> None:
    """MT 8: l = 3, decay 7: 12 slots."""
    weights = slot_weights((torch.arange(16) > 3)[None, None], 7.0)[0, 0]
    torch.testing.assert_close(weights[4:8], torch.tensor([1.0, 0.8669, 0.7515, 0.6514]), atol=5e-5, rtol=0)
    assert len(weights[4:]) == 12, "what stands before is not scored, so it does not matter what it weighs"


def test_a_block_holds_true_tokens_and_learns_what_is_behind_them() -> None:
    check_block(VariablePrefix(block_size=4, num_anchors=8))
    document = toy_document()
    layout = VariablePrefix(block_size=6, num_anchors=24).blocks(document, ALIGNMENT, seed=0, epoch=0)
    lengths = []
    for block, anchor in enumerate(layout.anchors[0].tolist()):
        masked = layout.input_ids[0, block] == ALIGNMENT.mask_token_id
        told = int((~masked).sum())
        assert told >= 1 and not masked[:told].any(), "the prefix has no holes"
        inside = min(told, len(document.input_ids) - anchor)
        assert torch.equal(layout.input_ids[0, block, :inside], document.input_ids[anchor : anchor + inside])
        assert not layout.scored[0, block, :told].any(), "what is told is not learned"
        lengths.append(told - 1)
    assert len({*lengths}) > 2, "lengths differ"
    plain = Anchored(block_size=6, num_anchors=24).blocks(document, ALIGNMENT, seed=0, epoch=0)
    assert torch.equal(plain.anchors, layout.anchors) and torch.equal(plain.labels, layout.labels)


def test_a_block_keeps_its_length_when_more_blocks_are_drawn() -> None:
    few, many = (
        VariablePrefix(block_size=6, num_anchors=count).blocks(toy_document(), ALIGNMENT, seed=1, epoch=2)
        for count in (4, 24)
    )
    at = torch.isin(many.anchors[0], few.anchors[0])
    assert torch.equal(many.input_ids[0, at], few.input_ids[0])


def test_lengths_follow_the_law() -> None:
    document = Document(0, torch.arange(4000) % 30, torch.ones(4000, dtype=torch.bool))
    layout = VariablePrefix(block_size=6, num_anchors=3900).blocks(document, ALIGNMENT, seed=0, epoch=0)
    whole = layout.anchors[0] < 3990
    lengths = (layout.input_ids[0, whole] != ALIGNMENT.mask_token_id).sum(1) - 1
    found = torch.bincount(lengths, minlength=5) / len(lengths)
    torch.testing.assert_close(found, prefix_law(6, 0.8).float(), atol=0.03, rtol=0)


def test_no_law_is_refused() -> None:
    with pytest.raises(ValueError, match=r"block\.beta"):
        VariablePrefix(beta=0.0)
