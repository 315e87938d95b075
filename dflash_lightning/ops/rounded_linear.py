"""Linear layers that multiply in bfloat16 and answer in their input's dtype: half the time on CPUs that compute it."""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dflash_lightning.ops.prepacked_linear import can_prepack, prepacked_product
from dflash_lightning.ops.shallow_copy import copy_tree


class RoundedLinear(nn.Module):
    """``linear`` with weight, bias and inputs rounded to bfloat16; the weight is copied now, later changes do not show.

    Sums are float32, the result is rounded once (to 2^-8, relative) and comes in the input's dtype. So what stands
    between the products (norms, softmax, residual sums) keeps its precision. For use without gradients.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().to(torch.bfloat16)
        bias = None if linear.bias is None else linear.bias.detach().to(torch.bfloat16)
        self.product = (
            prepacked_product(weight, bias)
            if can_prepack(weight)
            else partial(nn.functional.linear, weight=weight, bias=bias)
        )

    def forward(self, x: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        return self.product(x.to(torch.bfloat16)).to(x.dtype)


def round_linears(model: nn.Module) -> nn.Module:
    """A copy of ``model`` in which every ``nn.Linear`` is a ``RoundedLinear``; ``model`` itself is untouched."""
    return copy_tree(model, lambda module: RoundedLinear(module) if type(module) is nn.Linear else None)
