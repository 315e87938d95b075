"""Fused features with a mix per draft layer beside them: the formula, and when the whole is KV injection again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import Conditioning, KVInjection, ResidualMix
from dflash_lightning.conditioning.layer_mix import start_logits
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import MarginalHead
from dflash_lightning.model import DraftModel, make_draft_config
from dflash_lightning.types import TargetFeatures


def make_model(target: Any, conditioning: Conditioning, **settings: Any) -> DraftModel:
    config = make_draft_config(
        target.facts,
        block=Anchored(block_size=4),
        conditioning=conditioning,
        drafter=BlockTransformer(**{"num_layers": 2, "init_std": 0.2, **settings}),
        head=MarginalHead(),
        mask_token_id=262,
    )
    return DraftModel(config).eval()


@torch.no_grad()
def test_states_are_the_norm_of_the_fused_features_and_the_layers_own_mix(tiny_target: Any) -> None:
    """By hand, in the recipe's order of layers whichever order they are stored in; where the mix begins."""
    model = make_model(tiny_target, ResidualMix(target_layer_ids=[3, 0, 2]))
    part = model.conditioning
    part.hidden_norm.weight.copy_(1 + 0.2 * torch.randn(32))
    stored = TargetFeatures((0, 2, 3), torch.randn(1, 5, 3, 32))
    found = part.rows(stored, tiny_target.lm).states
    features = stored.hidden[:, :, [2, 0, 1]]
    shares = start_logits(2, 3, "distance").softmax(-1)
    assert shares[0].tolist() == pytest.approx([0.8668, 0.1173, 0.0159], abs=1e-4)
    for layer in range(2):
        total = features.flatten(2) @ part.fc.weight.T
        for t in range(3):
            total = total + shares[layer, t] * features[:, :, t]
        expected = total / (total.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()
        torch.testing.assert_close(found[:, :, layer], expected * part.hidden_norm.weight)


@torch.no_grad()
def test_equal_mixes_are_kv_injection_with_that_mix_in_its_matrix(tiny_target: Any, make_layout: Any) -> None:
    """The whole drafter; keys and values come from the projections that a layer has for its block."""
    mixed = make_model(tiny_target, ResidualMix(target_layer_ids=[0, 2, 3]))
    plain = make_model(tiny_target, KVInjection(target_layer_ids=[0, 2, 3]))
    plain.drafter.load_state_dict(mixed.drafter.state_dict())
    mixed.conditioning.mix.zero_()
    plain.conditioning.fc.weight.copy_(mixed.conditioning.fc.weight + torch.eye(32).repeat(1, 3) / 3)
    features = TargetFeatures((0, 2, 3), torch.randn(1, 12, 3, 32))
    layout, positions = make_layout([[4, 9]], block_size=4), torch.arange(12)[None]
    embeddings = tiny_target.embed(layout.input_ids)
    hidden = [m.block_hidden(embeddings, layout, features, positions, tiny_target.lm) for m in (mixed, plain)]
    torch.testing.assert_close(*hidden, rtol=0, atol=5e-6)
    assert {name for name, _ in mixed.conditioning.named_parameters()} == {"fc.weight", "hidden_norm.weight", "mix"}
    mixed.conditioning.mix[1, 0] = 1.0
    other = mixed.block_hidden(embeddings, layout, features, positions, tiny_target.lm)
    assert float((other - hidden[0]).abs().max()) > 1e-3


def test_every_weight_learns(tiny_target: Any, make_layout: Any) -> None:
    model, layout = make_model(tiny_target, ResidualMix(target_layer_ids=[0, 2])), make_layout([[4, 9]], block_size=4)
    features, positions = TargetFeatures((0, 2), torch.randn(1, 12, 2, 32)), torch.arange(12)[None]
    embeddings = tiny_target.embed(layout.input_ids)
    model.block_hidden(embeddings, layout, features, positions, tiny_target.lm).square().sum().backward()
    for name, parameter in model.conditioning.named_parameters():
        assert parameter.grad is not None and bool((parameter.grad != 0).any()), name


def test_a_start_that_nobody_knows_is_refused() -> None:
    with pytest.raises((ValueError, TypeError), match="middle"):  # the shape hook knows the literal too
        ResidualMix(start="middle")  # type: ignore[arg-type]
