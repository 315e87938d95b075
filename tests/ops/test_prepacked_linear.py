"""Packed linear layers against the plain ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dflash_lightning.ops.prepacked_linear import PrepackedLinear, can_prepack, prepack_linears

needs_packing = pytest.mark.skipif(not can_prepack(torch.ones(2, 2)), reason="oneDNN is not available on this machine")


@needs_packing
@pytest.mark.parametrize("rows", [(1,), (1, 1), (8,), (2, 5), (3, 7, 11)])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_product_equals_the_plain_one(rows: tuple[int, ...], bias: bool) -> None:
    linear = nn.Linear(48, 36, bias=bias)
    x = torch.randn(*rows, 48)
    with torch.no_grad():
        torch.testing.assert_close(PrepackedLinear(linear)(x), linear(x), atol=1e-5, rtol=1e-5)


@needs_packing
@pytest.mark.parametrize("bias", [True, False])
def test_siblings_packed_as_one_weight_answer_any_call_order(bias: bool) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(24, size, bias=bias) for size in (20, 8, 8))

    plain = Attention()
    packed = prepack_linears(plain)
    assert packed.q_proj.group is packed.k_proj.group is packed.v_proj.group
    x, y = torch.randn(2, 3, 24), torch.randn(2, 3, 24)
    calls = [("q_proj", x), ("k_proj", x), ("v_proj", x), ("v_proj", y), ("q_proj", y), ("k_proj", x), ("k_proj", y)]
    with torch.no_grad():
        for name, value in calls:
            torch.testing.assert_close(getattr(packed, name)(value), getattr(plain, name)(value), atol=1e-5, rtol=1e-5)


@needs_packing
def test_siblings_that_differ_are_packed_apart() -> None:
    mixed = nn.Module()
    mixed.gate_proj, mixed.up_proj = nn.Linear(8, 4, bias=True), nn.Linear(8, 4, bias=False)
    packed = prepack_linears(mixed)
    assert packed.gate_proj.group is not packed.up_proj.group
    x = torch.randn(5, 8)
    with torch.no_grad():
        torch.testing.assert_close(packed.up_proj(x), mixed.up_proj(x), atol=1e-5, rtol=1e-5)


@needs_packing
def test_packed_bfloat16_product_is_as_exact_as_the_plain_one() -> None:
    if not can_prepack(torch.ones(2, 2, dtype=torch.bfloat16)):
        pytest.skip("this CPU does not compute bfloat16")
    linear = nn.Linear(48, 36).to(torch.bfloat16)
    x = torch.randn(8, 48, dtype=torch.bfloat16)
    exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    with torch.no_grad():
        found = PrepackedLinear(linear)(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, atol=2e-2, rtol=2e-2)


@needs_packing
def test_a_model_is_packed_as_a_copy_that_shares_what_is_not_linear(make_tiny_model: Callable) -> None:
    model = make_tiny_model("llama")
    packed = prepack_linears(model)
    assert sum(isinstance(module, PrepackedLinear) for module in packed.modules()) == 4 * 7 + 1
    assert not any(isinstance(module, PrepackedLinear) for module in model.modules())
    assert packed.model.embed_tokens is not model.model.embed_tokens
    assert packed.model.embed_tokens.weight is model.model.embed_tokens.weight
    ids = torch.randint(0, 256, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(packed(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


@needs_packing
def test_packed_weights_are_those_of_the_moment() -> None:
    """Stated in the docstring, so that nobody packs a drafter before its last optimizer step and wonders."""
    linear = nn.Linear(16, 16)
    x = torch.randn(4, 16)
    packed = PrepackedLinear(linear)
    with torch.no_grad():
        before = linear(x).clone()
        linear.weight.mul_(2)
        torch.testing.assert_close(packed(x), before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_what_cannot_be_packed_stays_plain(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).to(dtype)
    packed = prepack_linears(model)
    assert type(packed[0]) is nn.Linear and packed[0].weight is model[0].weight
    x = torch.randn(3, 8, dtype=dtype)
    assert torch.equal(packed(x), model(x))


def test_without_onednn_everything_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert type(prepack_linears(nn.Sequential(nn.Linear(8, 8)))[0]) is nn.Linear
    assert not can_prepack(torch.ones(2, 2, device="meta"))
