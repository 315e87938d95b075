"""KV injection: which layers are tapped, what a context state is, and that decoding builds the same context."""

import pytest
import torch

from dflash_lightning.conditioning import KVInjection
from dflash_lightning.layer_ids import default_layer_ids
from dflash_lightning.types import FeatureSpec, TargetFeatures


@pytest.mark.parametrize(
    ("num_target_layers", "num_features", "ids"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (28, 5, [1, 7, 13, 19, 25]),
        (32, 5, [1, 8, 15, 22, 29]),
        (64, 5, [1, 16, 31, 46, 61]),
        (36, 3, [1, 17, 33]),
        (36, 9, [1, 5, 9, 13, 17, 21, 25, 29, 33]),
        (40, 8, [1, 6, 11, 16, 22, 27, 32, 37]),
        (36, 1, [18]),
        (7, 1, [3]),
    ],
)
def test_default_layers_are_those_of_the_released_code(num_target_layers, num_features, ids):
    assert default_layer_ids(num_target_layers, num_features) == ids
    assert KVInjection(num_features=num_features).default_layer_ids(num_target_layers) == ids


def test_more_features_than_the_target_can_space_out_are_refused():
    with pytest.raises(ValueError, match=r"num_features: 5 .* 6 decoder layers .*target_layer_ids=\[0, 1.* \(0..5\)"):
        KVInjection().default_layer_ids(6)
    with pytest.raises(ValueError, match="Use 1 or more"):
        KVInjection(num_features=0)


@pytest.mark.parametrize(("num_target_layers", "num_features"), [(3, 2), (2, 2), (4, 2), (4, 3), (1, 2), (5, 3)])
def test_layers_that_would_not_ascend_are_refused(num_target_layers, num_features):
    """(3, 2) is [1, 0] by the formula, which taps the layers in the wrong order."""
    with pytest.raises(ValueError, match=r"they would be \[.*\]\)\. Set conditioning\.num_features=1, or name"):
        default_layer_ids(num_target_layers, num_features)


@pytest.mark.parametrize("num_target_layers", [1, 2, 3])
def test_one_feature_fits_into_the_smallest_target(num_target_layers):
    assert default_layer_ids(num_target_layers, 1) == [num_target_layers // 2]


def test_explicit_layers_decide_what_is_required(tiny_target, make_draft):
    model = make_draft(tiny_target, target_layer_ids=[3, 1])
    assert model.conditioning.required() == FeatureSpec(layer_ids=(3, 1))
    assert model.required() == FeatureSpec(layer_ids=(1, 3))  # united specs are sorted
    assert model.config.target_layer_ids == [3, 1]


def test_a_state_is_the_norm_of_one_projection_of_all_layers(tiny_target, make_draft):
    part = make_draft(tiny_target).conditioning
    hidden = torch.randn(1, 5, 2, 32)
    by_layer = hidden[:, :, 0] @ part.fc.weight[:, :32].T + hidden[:, :, 1] @ part.fc.weight[:, 32:].T
    expected = by_layer / (by_layer.square().mean(-1, keepdim=True) + 1e-6).sqrt() * part.hidden_norm.weight
    torch.testing.assert_close(part.states(hidden), expected, rtol=0, atol=1e-6)


def test_features_are_picked_by_layer_id_in_the_configured_order(tiny_target, make_draft, make_layout):
    part = make_draft(tiny_target, target_layer_ids=[2, 0]).conditioning
    hidden = torch.randn(1, 5, 3, 32)
    features = TargetFeatures((0, 1, 2), hidden)
    context = part.prepare(features, torch.arange(5)[None], make_layout([[3]], block_size=2), tiny_target.lm)
    assert torch.equal(context.rows.states, part.states(hidden[:, :, [2, 0]]))


class Positions:
    """An attention whose values hold the position that each row was written for."""

    def project(self, states, positions):
        return states[..., None, :8].expand(-1, -1, 2, 8), positions[..., None, None].float().expand(-1, -1, 2, 8)

    def finish_keys(self, k, positions):
        return k


def test_new_rows_land_at_every_rows_own_cursor_and_stale_ones_are_overwritten(tiny_target, make_draft):
    model = make_draft(tiny_target)
    cache = model.make_cache(batch_size=2, max_length=9, chunk_rows=3)
    for keep in ([3, 1], [2, 3]):
        features = TargetFeatures((0, 2), torch.randn(2, 3, 2, 32))
        context = model._extend(features, torch.tensor(keep), cache, tiny_target.lm)
        (source,) = context.sources(0, Positions())
    assert cache.cursor.tolist() == [5, 4]
    assert source.end.tolist() == source.slot_row.tolist() == [[5], [4]]
    # Rows 0..cursor are their own positions.
    assert source.v[0, :6, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert source.v[1, :4, 0, 0].tolist() == [0, 1, 2, 3]
