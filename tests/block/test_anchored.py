"""Anchors, labels and masks of one document's blocks, with numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from dflash_lightning.block import Anchored, check_anchored
from dflash_lightning.block.anchored import draw_sorted
from dflash_lightning.schedule import decay_weights
from dflash_lightning.types import Alignment, BlockLayout, Document, LabelLayout

MASK = 99
BLOCK_FIELDS = [f.name for f in dataclasses.fields(BlockLayout) if f.name not in ("rows", "streams", "predicting")]


def make_document(mask: list[int], *, ids: list[int] | None = None, sample_id: int = 0) -> Document:
    ids = ids if ids is not None else list(range(10, 10 + len(mask)))
    return Document(sample_id, torch.tensor(ids, dtype=torch.long), torch.tensor(mask, dtype=torch.bool))


def make_blocks(
    document: Document,
    *,
    block_size: int = 4,
    num_anchors: int = 512,
    label_layout: LabelLayout = "same_position",
    seed: int = 0,
    epoch: int = 0,
    vocabulary: Tensor | None = None,
) -> BlockLayout:
    block = Anchored(block_size=block_size, num_anchors=num_anchors, label_layout=label_layout)
    alignment = Alignment(block_size, MASK, label_layout)
    return block.blocks(document, alignment, seed=seed, epoch=epoch, vocabulary=vocabulary)


def block_at(layout: BlockLayout, anchor: int) -> dict[str, Tensor]:
    n = layout.anchors[0].tolist().index(anchor)
    return {name: getattr(layout, name)[0, n] for name in BLOCK_FIELDS}


@pytest.mark.parametrize(
    "mask, anchors",
    [
        ([0, 0, 0, 1, 1, 1, 0, 1, 1, 0], [3, 4, 7]),
        ([0, 0, 1, 1, 1, 1, 0, 0], [2, 3, 4]),
        ([1, 1], [0]),
        ([0, 1, 0, 1], []),
        ([1], []),
        ([], []),
    ],
)
def test_anchors_are_supervised_tokens_with_a_supervised_successor(mask: list[int], anchors: list[int]) -> None:
    eligible = Anchored().eligible_anchors(torch.tensor(mask, dtype=torch.bool))
    assert eligible.tolist() == anchors
    assert make_blocks(make_document(mask)).anchors.tolist() == [anchors]


def test_t05_labels_mask_and_decay() -> None:
    layout = make_blocks(make_document([0, 0, 1, 1, 1, 1, 0, 0], ids=[5, 6, 7, 8, 9, 10, 11, 12]))
    weights = torch.cat([torch.zeros(1), decay_weights(3, 4.0)])

    first = block_at(layout, 2)
    assert first["input_ids"].tolist() == [7, MASK, MASK, MASK]
    assert first["position_ids"].tolist() == [2, 3, 4, 5]
    assert first["labels"][1:].tolist() == [8, 9, 10]
    assert first["prev_ids"][1:].tolist() == [7, 8, 9]
    assert first["scored"].tolist() == [False, True, True, True]
    assert (weights * first["valid"]).tolist() == pytest.approx([0, 1, math.exp(-1 / 4), math.exp(-2 / 4)])

    third = block_at(layout, 4)
    assert third["input_ids"].tolist() == [9, MASK, MASK, MASK]
    assert third["labels"][1:].tolist() == [10, 11, 12]
    assert third["scored"].tolist() == [False, True, False, False]
    assert (weights * third["valid"]).tolist() == [0, 1, 0, 0]
    assert layout.rows.tolist() == [1, 2, 3, 5, 6, 9]


@pytest.mark.parametrize(
    "label_layout, labels, teacher",
    [("same_position", [6, 7, 8], [5, 6, 7]), ("anchor_first", [6, 7, 8, 9], [5, 6, 7, 8])],
)
def test_label_teacher_and_previous_token_of_both_layouts(
    label_layout: LabelLayout, labels: list[int], teacher: list[int]
) -> None:
    """Anchor 5, block size 4; ids equal positions, so that labels are label indices."""
    document = make_document([1] * 12, ids=list(range(12)))
    block = block_at(make_blocks(document, label_layout=label_layout), 5)
    first = Alignment(4, MASK, label_layout).first_slot
    assert block["predicts"].tolist() == [k >= first for k in range(4)]
    assert block["scored"].tolist() == [k >= first for k in range(4)]
    assert block["labels"][first:].tolist() == labels
    assert block["label_index"][first:].tolist() == labels
    assert (block["label_index"][first:] - 1).tolist() == teacher
    assert block["prev_ids"][first:].tolist() == teacher
    assert block["position_ids"].tolist() == [5, 6, 7, 8]


def test_a_supervised_token_after_a_hole_is_scored_again() -> None:
    block = block_at(make_blocks(make_document([1, 1, 0, 1, 1]), block_size=5), 0)
    assert block["scored"].tolist() == [False, True, False, True, True]


def test_anchor_first_never_scores_the_turn_separator() -> None:
    """Read at the slot, the mask would let the last supervised token be labelled with what follows the turn."""
    layout = make_blocks(make_document([0, 1, 1, 1, 0, 0]), label_layout="anchor_first")
    assert block_at(layout, 1)["scored"].tolist() == [True, True, False, False]


@pytest.mark.parametrize("label_layout", ["same_position", "anchor_first"])
def test_blocks_at_the_end_have_masked_tails(label_layout: LabelLayout) -> None:
    layout = make_blocks(make_document([1] * 6), label_layout=label_layout)
    last = block_at(layout, 4)
    first = Alignment(4, MASK, label_layout).first_slot
    assert last["input_ids"].tolist() == [14, MASK, MASK, MASK]
    assert last["position_ids"].tolist() == [4, 5, 6, 7]
    assert last["scored"].tolist() == [k == first for k in range(4)]
    assert last["predicts"].tolist() == [k >= first for k in range(4)]
    assert int(layout.label_index.max()) == 5


def test_context_ends_strictly_before_the_anchor() -> None:
    layout = make_blocks(make_document([0, 0, 1, 1, 1]))
    assert layout.anchors.tolist() == [[2, 3]]
    assert layout.context_start.tolist() == [[0, 0]] and layout.context_end.tolist() == [[2, 3]]


def test_labels_outside_the_draft_vocabulary_are_scored_but_not_valid() -> None:
    vocabulary = torch.ones(100, dtype=torch.bool)
    vocabulary[12] = False
    block = block_at(make_blocks(make_document([1] * 6), vocabulary=vocabulary), 0)
    assert block["scored"].tolist() == [False, True, True, True]
    assert block["valid"].tolist() == [False, True, False, True]


@pytest.mark.parametrize("requested", [1, 2, 29, 30, 31, 512])
def test_exactly_as_many_distinct_sorted_anchors_as_asked_for_or_there_are(requested: int) -> None:
    document = make_document([0] * 10 + [1] * 31 + [0] * 5)
    anchors = make_blocks(document, num_anchors=requested).anchors[0].tolist()
    assert len(anchors) == min(requested, 30)
    assert anchors == sorted(set(anchors)) and set(anchors) <= set(range(10, 40))


def test_anchors_depend_on_seed_epoch_and_sample_alone() -> None:
    mask = [1] * 200

    def anchors(seed: int = 0, epoch: int = 0, sample_id: int = 0, block_size: int = 4) -> list[int]:
        document = make_document(mask, ids=[sample_id] * 200, sample_id=sample_id)
        layout = make_blocks(document, num_anchors=20, block_size=block_size, seed=seed, epoch=epoch)
        return layout.anchors[0].tolist()

    torch.manual_seed(1)
    reference = anchors()
    torch.manual_seed(2)
    assert anchors() == reference and anchors(block_size=16) == reference
    others = [anchors(seed=1), anchors(epoch=1), anchors(sample_id=1)]
    assert all(other != reference for other in others) and len({tuple(o) for o in others}) == 3


def test_a_drawn_set_is_fixed_across_versions() -> None:
    """A resumed run must draw what it would have drawn, also under another NumPy."""
    assert draw_sorted(torch.arange(100), 6, key=(7, 3, 11)).tolist() == [3, 17, 38, 51, 83, 94]


def test_more_anchors_keep_the_ones_already_drawn() -> None:
    few, many = (draw_sorted(torch.arange(100), n, key=(0, 0, 5)).tolist() for n in (10, 40))
    assert set(few) < set(many)


def test_anchors_are_drawn_uniformly() -> None:
    """3 of 10 in each of 2000 epochs: every candidate about 600 times (standard deviation 20)."""
    counts = torch.zeros(10)
    for epoch in range(2000):
        counts[draw_sorted(torch.arange(10), 3, key=(0, epoch, 0))] += 1
    assert counts.sum() == 6000 and (counts - 600).abs().max() < 100


def test_a_document_without_an_eligible_anchor_has_no_blocks() -> None:
    layout = make_blocks(make_document([0, 1, 0]))
    assert layout.input_ids.shape == (1, 0, 4) and len(layout.rows) == 0


@pytest.mark.parametrize("label_layout", ["same_position", "anchor_first"])
@pytest.mark.parametrize(
    "name, words",
    [
        ("labels", "not its token"),
        ("prev_ids", "token before"),
        ("label_index", "where its slot predicts"),
        ("rows", "rows"),
    ],
)
def test_an_off_by_one_layout_is_refused(label_layout: LabelLayout, name: str, words: str) -> None:
    document = make_document([1] * 12)
    layout = make_blocks(document, label_layout=label_layout)
    setattr(layout, name, getattr(layout, name) + 1)
    with pytest.raises(AssertionError, match=words):
        check_anchored(layout, document.input_ids[None], Alignment(4, MASK, label_layout))


def test_a_layout_is_refused_under_the_other_label_layout() -> None:
    document = make_document([1] * 12)
    with pytest.raises(AssertionError):
        check_anchored(make_blocks(document), document.input_ids[None], Alignment(4, MASK, "anchor_first"))


def test_settings_make_an_equal_component() -> None:
    block = Anchored(block_size=8, num_anchors=64, mask_token_id=5, label_layout="anchor_first", inputs="tokens")
    again = Anchored.from_settings("anchored", block.settings())
    assert isinstance(again, Anchored) and again.settings() == block.settings()
    assert block.settings() == {
        "block_size": 8,
        "num_anchors": 64,
        "mask_token_id": 5,
        "label_layout": "anchor_first",
        "inputs": "tokens",
        "placement": "random",
    }


def test_slots_may_hold_the_true_tokens_and_nothing_else_changes() -> None:
    """Slots beyond the document's end hold masks; labels, context and positions are those of masked blocks."""
    document = make_document([0, 1, 1, 1, 1, 1])
    alignment = Alignment(4, MASK, "anchor_first")
    masked, true = (
        Anchored(block_size=4, label_layout="anchor_first", inputs=inputs).blocks(document, alignment, seed=0, epoch=0)
        for inputs in ("masks", "tokens")
    )
    ids = document.input_ids.tolist()
    assert true.anchors.tolist() == [[1, 2, 3, 4]]
    assert true.input_ids[0].tolist() == [[*ids, MASK, MASK, MASK][a : a + 4] for a in (1, 2, 3, 4)]
    differing = [name for name, value in vars(masked).items() if not _equal(value, getattr(true, name))]
    assert differing == ["input_ids"]


def _equal(one: object, other: object) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"inputs": "words"}, "(?s)'words'.*'masks', 'tokens'"),
        ({"inputs": "tokens"}, "block.inputs: tokens.*Set block.label_layout=anchor_first"),
    ],
)
def test_slots_that_would_hold_their_own_label_are_refused(settings: dict[str, str], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):  # the shape hook knows the literal too
        Anchored(**settings)


def test_zero_anchors_are_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"block.num_anchors: 0 .* use 1 or more"):
        Anchored(num_anchors=0)


@pytest.mark.parametrize(
    "mask, anchors",
    [
        ([0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [3, 7]),
        ([0, 0, 0, 1, 1, 1, 1, 1], [3]),  # the token at 7 has no supervised successor
        ([1, 1, 0, 1, 1, 1, 1, 1, 1], [0, 3, 7]),  # every response is tiled from its own start
        ([0, 0], []),
        ([], []),
    ],
)
def test_tiled_blocks_stand_side_by_side_in_every_response(mask: list[int], anchors: list[int]) -> None:
    block, document = Anchored(block_size=4, placement="tiled"), make_document(mask)
    assert block.num_blocks(document.loss_mask) == len(anchors)
    for epoch in range(3):
        found = block.blocks(document, Alignment(4, MASK), seed=epoch, epoch=epoch)
        assert found.anchors.tolist() == [anchors]
    some = Anchored(block_size=4, placement="random", num_anchors=512)
    drawn = some.blocks(document, Alignment(4, MASK), seed=0, epoch=0)
    for anchor in anchors:  # in all but where it stands, such a block is any other
        ours, theirs = block_at(found, anchor), block_at(drawn, anchor)
        assert all(torch.equal(ours[name], theirs[name]) for name in BLOCK_FIELDS)


def test_an_unknown_placement_is_refused() -> None:
    with pytest.raises((ValueError, TypeCheckError)) as caught:  # the shape hook, where it is on, knows allowed words
        Anchored(placement="grid")  # type: ignore[arg-type]
    words = "block.placement: 'grid' is unknown. Use one of ['random', 'tiled']"
    assert isinstance(caught.value, TypeCheckError) or words in str(caught.value)
