"""Blocks that tile a response with random masks: where they stand, what they hold, what they learn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash_lightning.block import Anchored, Masked, check_layout, count_slots, merge_layouts
from dflash_lightning.block.masked import draw_uniform, mask_blocks
from dflash_lightning.loss import CrossEntropy
from dflash_lightning.ops.lm_head import HeadOutput, LanguageHead, View
from dflash_lightning.types import Alignment, BlockLayout, Document, SlotTotals, StepContext

MASK = 99
ALIGNMENT = Alignment(4, MASK)


def make_document(mask: list[int], *, sample_id: int = 0) -> Document:
    return Document(sample_id, torch.arange(len(mask)) % 80 + 10, torch.tensor(mask, dtype=torch.bool))


def blocks_of(document: Document, block: Masked | None = None, *, seed: int = 0, epoch: int = 0) -> BlockLayout:
    block = Masked(block_size=4) if block is None else block
    return block.blocks(document, Alignment(block.block_size, MASK), seed=seed, epoch=epoch)


@pytest.mark.parametrize(
    ("mask", "starts"),
    [
        ([0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [3, 7]),
        ([1, 1, 1, 1, 1], [0, 4]),
        ([0, 1, 0, 1, 1, 1, 1, 0, 1], [1, 3, 8]),  # every response is tiled from its own start
        ([0, 0], []),
        ([], []),
    ],
)
def test_blocks_stand_at_every_block_size_of_each_response(mask: list[int], starts: list[int]) -> None:
    block = Masked(block_size=4)
    supervised = torch.tensor(mask, dtype=torch.bool)
    assert block.eligible_anchors(supervised).tolist() == starts
    assert block.num_blocks(supervised) == len(starts)
    layout = blocks_of(make_document(mask))
    assert layout.anchors.tolist() == [starts] and torch.equal(layout.context_end, layout.anchors)


def test_the_documented_example() -> None:
    document = Document(0, torch.arange(10), torch.arange(10) >= 3)
    masked = torch.tensor([[0, 1, 0, 1], [1, 1, 0, 0]]).bool()
    layout = mask_blocks(document, torch.tensor([3, 7]), masked, ALIGNMENT)
    assert layout.input_ids[0].tolist() == [[3, MASK, 5, MASK], [MASK, MASK, 9, MASK]]
    assert layout.labels[layout.scored].tolist() == [4, 6, 7, 8] == (layout.prev_ids[layout.scored] + 1).tolist()
    assert layout.predicts[0].int().tolist() == [[0, 1, 0, 1], [1, 1, 0, 1]]
    check_layout(layout, document.input_ids[None], ALIGNMENT)


def test_slots_are_masked_with_the_rate_of_their_block_and_only_masked_slots_are_learned() -> None:
    """400 blocks of 16: the share of masked slots follows the block's own rate."""
    document = make_document([1] * 6400)
    layout = blocks_of(document, Masked(block_size=16, min_rate=0.2))
    masked, rates = layout.input_ids[0] == MASK, layout.streams["mask_rate"][0, :, 0]
    assert torch.equal(masked, layout.predicts[0]) and torch.equal(layout.input_ids[0] == layout.labels[0], ~masked)
    assert 0.2 <= rates.min() < 0.25 and 0.95 < rates.max() <= 1 and rates.mean() == pytest.approx(0.6, abs=0.05)
    share = masked.float().mean(1)
    assert (share - rates).abs().mean() < 0.12 and abs(float((share - rates).mean())) < 0.02
    assert masked[:, 0].float().mean() == pytest.approx(0.6, abs=0.08), "the first slot is masked like any other"
    learned = layout.scored[0].sum(1)
    assert torch.equal(layout.scored[0, 1:], masked[1:]) and len(learned.unique()) > 10


def test_the_first_token_of_a_document_and_what_is_behind_a_response_are_never_learned() -> None:
    """No target row teaches the former; the latter is the user's."""
    layout = blocks_of(make_document([1, 1, 0, 1, 1]), Masked(block_size=4, min_rate=1))
    assert layout.input_ids[0].tolist() == [[MASK] * 4, [MASK] * 4]
    assert layout.scored[0].int().tolist() == [[0, 1, 0, 0], [1, 1, 0, 0]]


def test_masks_depend_on_seed_epoch_and_sample_alone_and_not_on_how_many_blocks_are_used() -> None:
    document = make_document([1] * 200, sample_id=3)
    reference = blocks_of(document)
    torch.manual_seed(7)
    assert torch.equal(blocks_of(document).input_ids, reference.input_ids)
    for other in (blocks_of(document, epoch=1), blocks_of(document, seed=1)):
        assert not torch.equal(other.input_ids, reference.input_ids)
    few = blocks_of(document, Masked(block_size=4, num_anchors=9))
    assert few.anchors.shape == (1, 9) and torch.equal(few.anchors, few.anchors.sort().values)
    chosen = torch.isin(reference.anchors[0], few.anchors[0])
    assert torch.equal(reference.input_ids[:, chosen], few.input_ids)


def test_drawn_numbers_are_uniform_and_fixed_across_versions() -> None:
    bits = draw_uniform(4096, key=(7, 3, 11, 1))
    assert bits[:3].tolist() == pytest.approx([0.876432635576, 0.930957570988, 0.076727188592], abs=1e-12)
    assert bits.min() >= 0 and bits.max() < 1 and bits.mean() == pytest.approx(0.5, abs=0.02)


def test_packed_documents_keep_their_blocks_streams_and_totals() -> None:
    documents = [make_document([0, 1, 1, 1, 1, 1, 0, 1], sample_id=i) for i in range(2)]
    parts = [blocks_of(document) for document in documents]
    merged = merge_layouts([[(0, parts[0]), (8, parts[1])]], num_blocks=8, alignment=ALIGNMENT)
    ids = torch.cat([document.input_ids for document in documents])[None]
    check_layout(merged, ids, ALIGNMENT)
    assert merged.streams["mask_rate"].shape == (1, 8, 1) and merged.keep.sum() == 6
    totals = sum((count_slots(part, 4) for part in parts), SlotTotals.zeros(4))
    assert totals.valid.sum() == merged.valid.sum() and totals.documents == 2


def logits_of(layout: BlockLayout, hidden: Tensor) -> HeadOutput:
    lm = LanguageHead(torch.randn(100, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64))
    return HeadOutput({"main": View.of(hidden, layout.rows, lm)})


CTX = StepContext(0, 1, 0)


@pytest.mark.parametrize("decay", [None, 2.0])
def test_l4_a_mask_with_holes_weighs_and_counts_the_same_slots(decay: float | None) -> None:
    """Equal cross-entropies give that cross-entropy, whichever slots are masked, the first one included."""
    layout = blocks_of(make_document([0, *[1] * 64]), Masked(block_size=4, min_rate=0.3))
    assert layout.scored[..., 0].any() and not layout.scored[..., 0].all()
    assert (layout.predicts[..., 1:].int().diff(dim=-1) < 0).any(), "no block has a hole: nothing is shown"
    head = LanguageHead(torch.zeros(100, 6, dtype=torch.float64))  # every token has probability 1/100
    out = HeadOutput({"main": View.of(torch.randn(*layout.valid.shape, 6).double(), layout.rows, head)})
    loss = CrossEntropy(decay=decay)
    value = loss.numerator(out, layout, None, CTX) / loss.denominator(count_slots(layout, 4))
    assert value.item() == pytest.approx(torch.tensor(100.0).log().item(), rel=1e-6)


def test_with_a_clean_first_slot_and_all_others_masked_it_is_the_anchored_loss() -> None:
    """At the anchors that tiling gives, and equal weights."""
    document = make_document([0, 0, *[1] * 12])
    anchored = Anchored(block_size=4).blocks(document, ALIGNMENT, seed=0, epoch=0)
    tiled = torch.isin(anchored.anchors[0], torch.tensor([2, 6, 10]))
    masked = mask_blocks(document, torch.tensor([2, 6, 10]), (torch.arange(4) > 0).expand(3, 4), ALIGNMENT)
    for name in ("input_ids", "position_ids", "context_end", "predicts", "scored", "anchors"):
        assert torch.equal(getattr(masked, name), getattr(anchored, name)[:, tiled]), name
    hidden = torch.randn(1, len(tiled), 4, 6, dtype=torch.float64)
    anchored.valid = anchored.valid & tiled[None, :, None]
    loss = CrossEntropy()
    values = [
        loss.numerator(logits_of(layout, states), layout, None, CTX) / loss.denominator(count_slots(layout))
        for layout, states in ((anchored, hidden), (masked, hidden[:, tiled]))
    ]
    assert values[0].item() == pytest.approx(values[1].item(), rel=1e-12) and values[0] > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda made: made.input_ids.masked_fill_(made.predicts, 0), "neither the mask nor"),
        (lambda made: made.input_ids.copy_(made.labels), "fed what it predicts"),
        (lambda made: made.predicts.zero_(), "nest"),
        (lambda made: made.label_index.zero_(), "where its slot predicts"),
    ],
)
def test_a_layout_that_would_teach_the_wrong_thing_is_refused(change, words) -> None:  # type: ignore[no-untyped-def]
    document = make_document([0, *[1] * 11])
    layout = blocks_of(document, Masked(block_size=4, min_rate=1))
    change(layout)
    with pytest.raises(AssertionError, match=words):
        check_layout(layout, document.input_ids[None], ALIGNMENT)


def test_settings_make_an_equal_component_and_bad_ones_are_refused() -> None:
    block = Masked(block_size=8, num_anchors=3, min_rate=0.5, mask_token_id=5)
    again = Masked.from_settings("masked", block.settings())
    assert isinstance(again, Masked) and again.settings() == block.settings() and len(block.settings()) == 4
    with pytest.raises(ValueError, match=r"block\.min_rate: 0 is not a chance"):
        Masked(min_rate=0)
    with pytest.raises(ValueError, match=r"block\.num_anchors: 0 .*use 1 or more"):
        Masked(num_anchors=0)
