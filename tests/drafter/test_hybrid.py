"""State layers over blocks: the worked scan, blocks that do not see one another, and what the seed is worth."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dflash_lightning.conditioning import SeededTargetKV
from dflash_lightning.drafter import HybridDrafter
from dflash_lightning.drafter.state_layer import StateLayer, StateShape
from dflash_lightning.ops.state_scan import state_scan, state_steps
from dflash_lightning.testing import check_drafter, toy_batch, toy_module, toy_target

SMALL = {"num_layers": 2, "state_heads": 4, "state_head_dim": 3, "state_states": 2, "state_groups": 2, "init_std": 0.2}


def scanned(seed: float) -> torch.Tensor:
    one = torch.ones(3, 1, 1)
    x = torch.tensor([1.0, 0.0, 2.0]).view(3, 1, 1)
    return state_scan(x, torch.full((3, 1), 0.5), -torch.ones(1), one, one, torch.full((1, 1, 1), seed)).flatten()


def test_the_worked_scan() -> None:
    """MT 2.4 f: step .5, x = (1, 0, 2), seeds 2 and 0, and their difference 2 exp(-step t)."""
    torch.testing.assert_close(scanned(2.0), torch.tensor([1.713061, 1.039024, 1.630200]), atol=1e-6, rtol=0)
    torch.testing.assert_close(scanned(0.0), torch.tensor([0.5, 0.303265, 1.183940]), atol=1e-6, rtol=0)
    gap = torch.tensor([1.213061, 0.735759, 0.446260])
    torch.testing.assert_close(scanned(2.0) - scanned(0.0), gap, atol=1e-6, rtol=0)


def test_the_scan_of_all_slots_is_the_recurrence_and_so_is_its_gradient() -> None:
    make = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64)

    inputs = (draw(2, 3, 5, 4, 6), draw(2, 3, 5, 4).exp(), -draw(4).exp(), draw(2, 3, 5, 4, 2), draw(2, 3, 5, 4, 2))
    inputs = tuple(x.requires_grad_() for x in (*inputs, draw(2, 3, 4, 6, 2)))
    found, expected = state_scan(*inputs), state_steps(*inputs)
    torch.testing.assert_close(found, expected)
    for one, other in zip(*(torch.autograd.grad(y.square().sum(), inputs) for y in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)


def test_a_strong_decay_makes_no_number_that_is_none() -> None:
    x = torch.ones(8, 1, 1, requires_grad=True)
    one = torch.ones(8, 1, 1)
    y = state_scan(x, torch.full((8, 1), 200.0), torch.tensor([-16.0]), one, one, torch.ones(1, 1, 1))
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.isfinite(y).all() and torch.isfinite(slope).all()


@torch.no_grad()
def test_blocks_of_a_state_layer_do_not_see_one_another_nor_slots_behind() -> None:
    torch.manual_seed(0)
    layer = StateLayer(8, StateShape(4, 3, 2, 2, 4), eps=1e-6)
    layer.initialise(std=0.5)
    x, seed = torch.randn(2, 5, 6, 8), torch.randn(2, 5, 24)
    order = torch.randperm(5)
    torch.testing.assert_close(layer(x, seed)[:, order], layer(x[:, order], seed[:, order]))
    changed = x.clone()
    changed[:, :, 3:] += 1.0
    torch.testing.assert_close(layer(changed, seed)[:, :, :3], layer(x, seed)[:, :, :3])
    assert not torch.allclose(layer(changed, seed)[:, :, 3:], layer(x, seed)[:, :, 3:])
    assert not torch.allclose(layer(x, seed + 1.0)[:, :, 5], layer(x, seed)[:, :, 5]), "the seed reaches the last slot"


@torch.no_grad()
def test_without_a_seed_hidden_states_of_the_target_say_nothing() -> None:
    """A seed projection of zeros leaves the keys and values as the only way from the target."""
    module = toy_module(drafter=HybridDrafter(**SMALL), conditioning=SeededTargetKV(target_layer_ids=[1, 3]))
    model, batch = module.draft_model, toy_batch(module)
    features = toy_target().features(batch.input_ids, batch.position_ids, module.required())
    other = replace(features, hidden=features.hidden + torch.randn_like(features.hidden))
    elsewhere = replace(features, keys=features.keys + 1.0)

    def hidden(read):
        slots = toy_target().embed(batch.layout.input_ids)
        return model.block_hidden(slots, batch.layout, read, batch.position_ids, toy_target().lm)

    assert not torch.allclose(hidden(features), hidden(other))
    model.drafter.seed_proj.weight.zero_()
    torch.testing.assert_close(hidden(features), hidden(other))
    assert not torch.allclose(hidden(features), hidden(elsewhere))


@pytest.mark.parametrize(
    "settings",
    [{"qk_norm": False, "is_causal": True}, {"sliding_window": 3, "init_from_target": True, "lead": "", "group": "AM"}],
    ids=["causal", "window"],
)
def test_a_block_is_decoded_as_it_is_trained(settings) -> None:
    check_drafter(HybridDrafter(**SMALL, **settings), SeededTargetKV(kv_layer_ids=[5, 2], target_layer_ids=[1, 3]))


def test_attention_starts_from_the_layers_that_it_reads() -> None:
    drafter = HybridDrafter(**SMALL, init_from_target=True, qk_norm=False)
    module = toy_module(drafter=drafter, conditioning=SeededTargetKV(kv_layer_ids=[5, 2], target_layer_ids=[1, 3]))
    torch.manual_seed(0)  # the toy moves all weights a little, in the order of the parameters
    moved = {name: 0.1 * torch.randn_like(p) for name, p in module.draft_model.named_parameters()}
    for place, source in ((3, 5), (6, 2)):
        for name, value in toy_target().decoder_layer_state(source).items():
            own = f"drafter.layers.{place}.{name}"
            if own in moved:
                found = module.draft_model.get_parameter(own) - moved[own]
                torch.testing.assert_close(found, value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_layers": 0}, "drafter.num_layers"),
        ({"lead": "MA"}, "drafter.lead"),
        ({"group": "MF"}, "drafter.group"),
        ({"group": "MAA"}, "drafter.group"),
        ({"sliding_window": 0}, "drafter.sliding_window"),
        ({"state_heads": 0}, "drafter.state_heads"),
        ({"state_groups": 5}, "drafter.state_groups"),
    ],
)
def test_sublayers_that_make_no_drafter_are_refused(settings, said) -> None:
    with pytest.raises(ValueError, match=said):
        HybridDrafter(**settings)
