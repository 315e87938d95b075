"""Convolutions over slots: worked numbers, the identity at the start, and the edge of a block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_lightning.conditioning import KVInjection
from dflash_lightning.drafter import BlockTransformer, ConvTransformer
from dflash_lightning.drafter.conv_layer import IN, OUT, ConvLayer, SlotConvolution
from dflash_lightning.geometry import LayerGeometry
from dflash_lightning.testing import check_drafter, toy_batch, toy_module


def test_the_worked_convolution_begins_anew_in_every_block() -> None:
    """MT 3.4 f: without the edge of the block 2.75 would stand at place 3."""
    convolution = SlotConvolution(2, taps=2, group=2)
    convolution.initialise(projection_std=0.0)
    convolution.base_kernel.data[IN] = torch.tensor([[0.5], [0.25]])
    x = torch.arange(1.0, 7.0).view(1, 2, 3, 1).expand(1, 2, 3, 2)
    found = convolution(x, convolution.deltas(x), IN)
    assert found[..., 0].flatten().tolist() == [0.5, 1.25, 2.0, 2.0, 3.5, 4.25]
    assert torch.equal(convolution(x, convolution.deltas(x), OUT), x), "the other side is still the identity"


@torch.no_grad()
def test_what_the_input_adds_is_ordered_by_side_tap_and_group() -> None:
    """Rows of the projection: [side, tap, group]; both sides read the same input."""
    convolution = SlotConvolution(4, taps=2, group=2)
    convolution.initialise(projection_std=0.0)
    weight = convolution.kernel_projection.weight
    weight[0 * 4 + 1 * 2 + 1, 3] = 1.0  # side in, tap 1, group 1
    weight[1 * 4 + 0 * 2 + 0, 0] = 2.0  # side out, tap 0, group 0
    x = torch.randn(1, 1, 3, 4)
    deltas, y = convolution.deltas(x), torch.randn(1, 1, 3, 4)
    before, after = convolution(x, deltas, IN), convolution(y, deltas, OUT)
    lag = torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :, :3]
    torch.testing.assert_close(before[..., 2:], x[..., 2:] + x[..., 3:] * lag[..., 2:])
    torch.testing.assert_close(before[..., :2], x[..., :2])
    torch.testing.assert_close(after[..., :2], y[..., :2] * (1 + 2 * x[..., :1]))
    torch.testing.assert_close(after[..., 2:], y[..., 2:])


def test_the_published_size() -> None:
    """MH 2.1: 42 106 880 weights in the convolutions of five layers of width 4096, under these names."""
    with torch.device("meta"):
        layer = ConvLayer(
            LayerGeometry(
                **{"hidden_size": 4096, "intermediate_size": 8, "num_hidden_layers": 5, "num_attention_heads": 1},
                **{"num_key_value_heads": 1, "head_dim": 8, "rope_parameters": {"rope_theta": 1e4}},
            ),
            0,
            taps=2,
            group=16,
            projection_std=0.0,
        )
    own = {name: tuple(value.shape) for name, value in layer.state_dict().items() if "_conv." in name}
    assert own == {
        f"{place}_conv.{name}": shape
        for place in ("attention", "mlp")
        for name, shape in [("base_kernel", (2, 2, 4096)), ("kernel_projection.weight", (1024, 4096))]
    }
    assert 5 * sum(torch.Size(shape).numel() for shape in own.values()) == 42_106_880


def hidden(drafter: Any) -> torch.Tensor:
    """Of a toy batch; the weights that both kinds of layers have are the same."""
    module = toy_module(drafter=drafter)
    generator = torch.Generator().manual_seed(0)
    for name, weight in sorted(module.draft_model.named_parameters()):
        if "_conv." not in name:
            weight.data = 0.3 * torch.randn(weight.shape, generator=generator)
    for layer in module.draft_model.drafter.modules():
        if isinstance(layer, SlotConvolution):
            layer.initialise(projection_std=0.0)
    batch = toy_batch(module)
    model, target = module.draft_model, module.target
    with torch.no_grad():
        features = target.features(batch.input_ids, batch.position_ids, module.required())
        slots = target.embed(batch.layout.input_ids)
        return model.block_hidden(slots, batch.layout, features, batch.position_ids, target.lm)


def test_it_starts_as_the_drafter_without_convolutions_bit_for_bit() -> None:
    plain, convolved = hidden(BlockTransformer(num_layers=2)), hidden(ConvTransformer(num_layers=2, group_size=8))
    assert torch.equal(plain, convolved)


def test_training_and_decoding_are_one() -> None:
    check_drafter(ConvTransformer(num_layers=2, group_size=8))
    check_drafter(
        ConvTransformer(num_layers=1, group_size=4, kernel_size=3, is_causal=True), KVInjection(target_layer_ids=[1])
    )


def test_a_warm_start_copies_what_the_target_has(tiny_target: Any) -> None:
    module = toy_module(drafter=ConvTransformer(num_layers=2, group_size=8, init_from_target=True, qk_norm_gain=1.5))
    names = {name for name, _ in module.draft_model.drafter.named_parameters()}
    assert {"layers.0.attention_conv.base_kernel", "layers.1.mlp_conv.kernel_projection.weight"} <= names


def test_settings_that_make_no_convolution_are_refused() -> None:
    with pytest.raises(ValueError, match=r"drafter\.kernel_size: 0 reads no slot"):
        ConvTransformer(kernel_size=0)
    with pytest.raises(ValueError, match=r"drafter\.group_size: 5 does not divide the drafter's width"):
        toy_module(drafter=ConvTransformer(num_layers=1, group_size=5))
