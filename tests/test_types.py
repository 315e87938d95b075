"""Values that pass between the parts."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric.utilities import move_data_to_device

from dflash_lightning.types import Alignment, FeatureSpec, LabelLayout, SlotTotals, TargetFeatures


@pytest.mark.parametrize(
    "label_layout, shift, first_slot, num_drafts", [("same_position", 0, 1, 15), ("anchor_first", 1, 0, 16)]
)
def test_label_layouts_differ_in_shift_first_slot_and_drafts(
    label_layout: LabelLayout, shift: int, first_slot: int, num_drafts: int
) -> None:
    alignment = Alignment(16, 5, label_layout)
    assert (alignment.shift, alignment.first_slot, alignment.num_drafts) == (shift, first_slot, num_drafts)


@pytest.mark.parametrize("block_size", [1, 0, -4])
def test_a_block_without_a_slot_to_draft_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match=rf"block.block_size: {block_size} .* use 2 or more"):
        Alignment(block_size, 5)


def test_an_unknown_label_layout_is_refused_with_the_known_ones() -> None:
    # Built past the shape hook, which would refuse the literal first.
    alignment = Alignment(4, 5)
    object.__setattr__(alignment, "label_layout", "shifted")
    with pytest.raises(ValueError, match=r"'shifted' is unknown. Use one of \['same_position', 'anchor_first'\]"):
        alignment.__post_init__()


def test_feature_specs_unite_to_sorted_distinct_layers() -> None:
    united = FeatureSpec((9, 1)) | FeatureSpec((5, 1), last_hidden=True) | FeatureSpec()
    assert united == FeatureSpec((1, 5, 9), last_hidden=True)


def test_features_are_selected_by_layer_in_the_order_asked_for() -> None:
    hidden = torch.tensor([10.0, 20.0, 30.0]).view(1, 1, 3, 1)
    features = TargetFeatures((1, 5, 9), hidden)
    assert features.select((9, 1)).flatten().tolist() == [30.0, 10.0]
    assert features.select((1, 5, 9)) is hidden
    with pytest.raises(ValueError, match=r"layers \[4\] were asked for"):
        features.select((1, 4))


def test_layers_that_the_features_do_not_hold_are_named() -> None:
    features = TargetFeatures((1, 3), torch.zeros(1, 2, 2, 4))
    with pytest.raises(ValueError, match=r"features hold target layers \[1, 3\], but layers \[0\] were asked for"):
        features.select((3, 0))


def _features() -> TargetFeatures:
    ids = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
    states = torch.arange(2 * 4 * 2 * 3).view(2, 4, 2, 3).float()
    return TargetFeatures((4, 1), states, states[:, :, 0] + 0.5, ids)


def test_the_token_after_a_row_follows_from_the_tokens_and_behind_the_last_kept_row_from_the_loop() -> None:
    features = _features()
    assert features.next_ids is not None
    assert features.next_ids.tolist() == [[6, 7, 8, 0], [2, 3, 4, 0]]
    told = features.with_next(torch.tensor([4, 2]), torch.tensor([70, 71]))
    assert told.next_ids is not None
    assert told.next_ids.tolist() == [[6, 7, 8, 70], [2, 71, 4, 0]]
    assert features.next_ids.tolist() == [[6, 7, 8, 0], [2, 3, 4, 0]]
    assert TargetFeatures((4, 1), features.hidden).next_ids is None


def test_rows_of_a_path_are_a_run_of_their_own() -> None:
    """Nodes 0, 2 and 3 of the first row, 0, 1 and 3 of the second: what follows a token is the next node's."""
    features = _features()
    path = torch.tensor([[0, 2, 3], [0, 1, 3]])
    taken = features.take(path)
    assert taken.ids is not None and taken.next_ids is not None and taken.last_hidden is not None
    assert taken.ids.tolist() == [[5, 7, 8], [1, 2, 4]] and taken.next_ids.tolist() == [[7, 8, 0], [2, 4, 0]]
    assert features.last_hidden is not None
    for b, nodes in enumerate(path.tolist()):
        assert torch.equal(taken.hidden[b], features.hidden[b, nodes])
        assert torch.equal(taken.last_hidden[b], features.last_hidden[b, nodes])


def test_every_tensor_of_a_record_goes_through_every_move() -> None:
    """One that is dropped anywhere is missing here."""
    features = _features()
    names = {"hidden", "last_hidden", "ids", "next_ids"}
    halves = features.in_dtype(torch.float16)
    assert not hasattr(features, "to"), "Lightning moves what has such a method by it, and not tensor by tensor"
    taken = features.take(torch.tensor([[1], [2]]))
    moved = {"map": features.map(torch.clone), "rows": features.rows(1, 3), "take": taken, "to": halves}
    for how, record in moved.items():
        assert record.tensors().keys() == names, how
    assert {name for name, x in halves.tensors().items() if x.dtype == torch.float16} == {"hidden", "last_hidden"}
    room = TargetFeatures.empty(FeatureSpec((1,), True), (2, 4), 3, dtype=torch.float64, tokens=True)
    room.rows(1, 3).copy_(features.rows(1, 3))
    assert torch.equal(room.hidden[:, 1:3], features.select((1,))[:, 1:3].double())
    assert room.ids is not None and features.ids is not None and torch.equal(room.ids[:, 1:3], features.ids[:, 1:3])
    with pytest.raises(ValueError, match=r"features hold no \['ids', 'last_hidden', 'next_ids'\]"):
        room.copy_(TargetFeatures((4, 1), features.hidden))


def test_totals_of_parts_add_up_and_survive_the_all_reduce_vector() -> None:
    one = SlotTotals(torch.tensor([0.0, 3, 2]), torch.tensor([0.0, 3, 1]), torch.tensor(3.0), torch.tensor(2.0))
    two = SlotTotals(torch.tensor([0.0, 1, 0]), torch.tensor([0.0, 1, 0]), torch.tensor(1.0), torch.tensor(1.0))
    total = one + two
    assert total.valid.tolist() == [0, 4, 2] and total.prefix_valid.tolist() == [0, 4, 1]
    assert total.blocks.item() == 4 and total.documents.item() == 3
    again = SlotTotals.unpack(total.pack())
    assert total.pack().shape == (8,) and torch.equal(again.pack(), total.pack())
    assert torch.equal((total + SlotTotals.zeros(3)).pack(), total.pack())


def test_a_batch_that_lightning_moves_leaves_no_tensor_of_its_features_behind():
    features = TargetFeatures((1,), torch.zeros(1, 3, 1, 4), torch.zeros(1, 3, 4), torch.arange(3)[None])
    moved = move_data_to_device({"features": features}, torch.device("meta"))["features"]
    devices = {name: tensor.device.type for name, tensor in moved.tensors().items()}
    assert devices == dict.fromkeys(("hidden", "last_hidden", "ids", "next_ids"), "meta")
