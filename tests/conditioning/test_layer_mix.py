"""Mixes per draft layer: the two published starts, the worked example, and when the whole is KV injection again."""

import pytest
import torch

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import KVInjection, LayerMix
from dflash_lightning.conditioning.layer_mix import start_logits
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import MarginalHead
from dflash_lightning.model import DraftModel, make_draft_config
from dflash_lightning.types import TargetFeatures


def make_model(target, conditioning, **settings):
    config = make_draft_config(
        target.facts,
        block=Anchored(block_size=4),
        conditioning=conditioning,
        drafter=BlockTransformer(**{"num_layers": 2, "init_std": 0.2, **settings}),
        head=MarginalHead(),
        mask_token_id=262,
    )
    return DraftModel(config).eval()


def test_the_starts_prefer_the_layers_that_the_two_programs_prefer():
    peak, distance = start_logits(7, 9, "peak"), start_logits(7, 9, "distance")
    assert peak.argmax(-1).tolist() == [0, 1, 2, 3, 5, 6, 7]
    assert distance.argmax(-1).tolist() == [0, 1, 3, 4, 5, 7, 8]
    weights = peak.softmax(-1)
    assert weights.max(-1).values.tolist() == pytest.approx([0.480150] * 7, abs=1e-6)
    assert weights.min(-1).values.tolist() == pytest.approx([0.064981] * 7, abs=1e-6)
    assert float(start_logits(5, 5, "peak").softmax(-1).max()) == pytest.approx(0.648786, abs=1e-6)
    assert distance[0].softmax(-1)[:3].tolist() == pytest.approx([0.8647, 0.1170, 0.0158], abs=5e-5)
    centre = distance[3].softmax(-1)
    assert centre[[3, 4, 5]].tolist() == pytest.approx([0.1031, 0.7617, 0.1031], abs=5e-5)
    assert start_logits(1, 3, "distance").tolist() == [[0.0, -2.0, -4.0]]


def mixes(target, features, **settings):
    """What each draft layer mixes, before the norm."""
    model = make_model(target, LayerMix(**settings))
    model.conditioning.context_norm = torch.nn.Identity()
    return model.conditioning.rows(features, target.lm).states


def test_the_worked_example_of_three_features_and_two_layers(tiny_target):
    features = TargetFeatures((0, 1, 3), torch.tensor([1.0, 2.0, 3.0])[:, None].expand(1, 1, 3, 32))
    found = mixes(tiny_target, features, target_layer_ids=[0, 1, 3])
    assert found[0, 0, :, 0].tolist() == pytest.approx([1.319521, 2.000000], abs=1e-6)


def test_weights_go_by_the_recipes_order_of_layers_not_by_the_order_of_storage(tiny_target):
    stored = TargetFeatures((0, 1, 3), torch.tensor([1.0, 2.0, 3.0])[:, None].expand(1, 1, 3, 32))
    found = mixes(tiny_target, stored, target_layer_ids=[3, 1, 0])
    assert found[0, 0, :, 0].tolist() == pytest.approx([4 - 1.319521, 2.000000], abs=1e-6)


@pytest.mark.parametrize("own", [True, False])
@torch.no_grad()
def test_equal_weights_and_tied_projections_are_kv_injection_of_the_mean(tiny_target, make_layout, own):
    """The whole drafter: ``fc = [I .. I] / T``, and the context's projections those of the draft layers."""
    mixed = make_model(tiny_target, LayerMix(target_layer_ids=[0, 2, 3], own_projections=own))
    plain = make_model(tiny_target, KVInjection(target_layer_ids=[0, 2, 3]))
    for model in (mixed, plain):
        model.drafter.load_state_dict(mixed.drafter.state_dict())
    gain = 1 + 0.2 * torch.randn(32)
    mixed.conditioning.mix.zero_()
    mixed.conditioning.context_norm.weight.copy_(gain)
    plain.conditioning.hidden_norm.weight.copy_(gain)
    plain.conditioning.fc.weight.copy_(torch.eye(32).repeat(1, 3) / 3)
    for i, layer in enumerate(mixed.drafter.layers if own else []):
        mixed.conditioning.context_k_proj[i].weight.copy_(layer.self_attn.k_proj.weight)
        mixed.conditioning.context_v_proj[i].weight.copy_(layer.self_attn.v_proj.weight)
    features = TargetFeatures((0, 2, 3), torch.randn(1, 12, 3, 32))
    layout, positions = make_layout([[4, 9]], block_size=4), torch.arange(12)[None]
    embeddings = tiny_target.embed(layout.input_ids)
    hidden = [m.block_hidden(embeddings, layout, features, positions, tiny_target.lm) for m in (mixed, plain)]
    torch.testing.assert_close(*hidden, rtol=0, atol=5e-6)
    mixed.conditioning.mix[1, 0] = 1.0
    other = mixed.block_hidden(embeddings, layout, features, positions, tiny_target.lm)
    assert float((other - hidden[0]).abs().max()) > 1e-3


def test_a_warm_start_copies_the_projections_of_the_layers_that_the_drafter_copies(make_target):
    target = make_target("qwen3")
    model = make_model(target, LayerMix(target_layer_ids=[0, 2]), init_from_target=True)
    model.warm_start(target.decoder_layer_state)
    for i in range(2):
        state = target.decoder_layer_state(2 + i)
        assert torch.equal(model.conditioning.context_k_proj[i].weight, state["self_attn.k_proj.weight"])
        assert torch.equal(model.drafter.layers[i].self_attn.v_proj.weight, state["self_attn.v_proj.weight"])
        assert torch.equal(model.conditioning.context_v_proj[i].weight, state["self_attn.v_proj.weight"])
    other = make_model(target, LayerMix(target_layer_ids=[0, 2]), init_from_target=True, head_dim=4)
    with pytest.raises(ValueError, match=r"needs self_attn.k_proj.weight of shape \(8, 32\).*init_from_target=false"):
        other.conditioning.warm_start({i: target.decoder_layer_state(i) for i in (2, 3)})


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"num_features": 0}, "Use 1 or more"), ({"start": "middle"}, "middle")],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):  # the shape hook knows the literal too
        LayerMix(**settings)
