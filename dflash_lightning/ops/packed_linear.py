"""Linear layers whose weights are laid out for oneDNN once, for decoding on a CPU.

``F.linear`` on the CPU re-packs its weight on every call with more than one row, which makes verifying a block of 8
tokens cost 2.4x one token; with weights packed beforehand it costs about 1.2x (SmolLM2-135M, fp32, 2 cores). One row
is a matrix times vector, where the plain weight is faster than the packed one, so both are kept: memory doubles.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dflash_lightning.ops.shallow_copy import copy_tree

_ROWS_HINT = 16  # the layout is chosen for about this many rows; it works, and is as exact, for any number


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can lay this weight out its own way: on the CPU, float32, or bfloat16 where it computes that."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class PackedLinear(nn.Module):
    """``F.linear`` with the weights of ``linear`` packed now: later changes of the weights do not show.

    Results differ from the plain product in the last bits (about 1e-6 relative). For use without gradients.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        assert can_pack(linear.weight), (linear.weight.device, linear.weight.dtype)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight: Tensor
        self.bias: Tensor | None
        self.packed: Tensor
        # Plain attributes: neither is a parameter or buffer of this module, and the packed one cannot be saved.
        self.__dict__["weight"] = linear.weight.detach()
        self.__dict__["bias"] = None if linear.bias is None else linear.bias.detach()
        self.__dict__["packed"] = torch.ops.mkldnn._reorder_linear_weight(self.weight, _ROWS_HINT)

    def forward(self, x: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        if x.numel() == self.in_features:
            return nn.functional.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def pack_linears(model: nn.Module) -> nn.Module:
    """A decode-only copy of ``model`` in which every ``nn.Linear`` is packed; ``model`` itself is untouched.

    Where packing is not possible (see ``can_pack``) the plain layers stay, so the copy works everywhere.
    """
    return copy_tree(model, _pack)


def _pack(module: nn.Module) -> nn.Module | None:
    if type(module) is nn.Linear and can_pack(module.weight):
        return PackedLinear(module)
    return None
