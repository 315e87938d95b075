"""Products in bfloat16 inside a float32 model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dflash_lightning.ops import rounded_linear
from dflash_lightning.ops.rounded_linear import RoundedLinear, round_linears


@pytest.mark.parametrize("laid_out", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(1,), (3, 7), (2, 3, 64)])
def test_factors_are_rounded_and_sums_are_not(
    monkeypatch: pytest.MonkeyPatch, rows: tuple[int, ...], bias: bool, laid_out: bool
) -> None:
    if not laid_out:
        monkeypatch.setattr(rounded_linear, "can_prepack", lambda weight: False)
    torch.manual_seed(0)
    linear, x = nn.Linear(48, 36, bias=bias), torch.randn(*rows, 48)
    with torch.no_grad():
        found = RoundedLinear(linear)(x)
        exact = nn.functional.linear(
            x.bfloat16().double(), linear.weight.bfloat16().double(), linear.bias.bfloat16().double() if bias else None
        )
        assert found.dtype == torch.float32 and not torch.equal(found, linear(x))
    torch.testing.assert_close(found, exact.float(), atol=1e-3, rtol=2**-8)


def test_only_linear_layers_are_replaced_and_the_model_is_left_alone() -> None:
    class Special(nn.Linear):
        """A layer of a family that computes something else."""

    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), Special(8, 8))
    parts = list(model)
    rounded = round_linears(model)
    assert [type(part) for part in rounded.children()] == [RoundedLinear, nn.LayerNorm, Special]
    assert list(model) == parts
    assert rounded[1].weight is model[1].weight and rounded[2].weight is model[2].weight
