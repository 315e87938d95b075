"""Linear layers whose weights are laid out anew once, for decoding on a CPU.

``F.linear`` on the CPU re-packs its weight on every call with more than one row, which makes verifying a block of 8
tokens cost about twice one token. Weights in float32 are laid out for ``RowProduct``, whose eight rows cost what one
costs. One row goes through it too: a row then has the same bits alone and in a block, and plain decoding is as fast as
it can be (on some processors twice as fast as with PyTorch's matrix times vector). Where it cannot be compiled, and in
bfloat16, oneDNN packs (1.5x); in float32 one row is multiplied with the plain weight then. Projections of one input
(q/k/v, gate/up) become one weight: few wide products beat many narrow ones by a tenth of the whole forward. The
plain weights are kept beside the prepacked ones: memory doubles.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dflash_lightning.device import abilities
from dflash_lightning.ops.row_product import RowProduct, can_multiply
from dflash_lightning.ops.shallow_copy import copy_tree

_ROWS_HINT = 16  # the layout is chosen for about this many rows; it works, and is as exact, for any number
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # children that read the same input


def can_prepack(weight: Tensor) -> bool:
    """Whether there is a layout for this weight [O I]: on the CPU, float32, or bfloat16 where oneDNN computes that."""
    if not abilities(weight.device).own_kernels or not torch.backends.mkldnn.is_available():
        return False
    if is_traceable_wrapper_subclass(weight):  # quantised, or cut over ranks
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def prepacked_product(weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None) -> Callable[[Tensor], Tensor]:
    """``x @ weight.T + bias`` for ``x`` [*rows I], with the weight laid out now; see ``can_prepack``."""
    if can_multiply(weight):
        return RowProduct(weight, bias)
    prepacked = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, prepacked, bias, "none", [], "")


class PrepackedGroup:
    """Several linear layers of one input as one prepacked product, split afterwards.

    The product is made when the first layer is called and kept until the last one has asked for its part. A layer
    called with any other input gets the right answer too, at the price of another product.
    """

    def __init__(self, linears: list[nn.Linear]) -> None:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias for linear in linears if linear.bias is not None]
        assert can_prepack(weight) and len(biases) in (0, len(linears))
        self.sizes = [linear.out_features for linear in linears]
        self.product = prepacked_product(weight, torch.cat([bias.detach() for bias in biases]) if biases else None)
        self.any_rows = isinstance(self.product, RowProduct)  # best for one row too
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def part(self, x: Float[Tensor, "*rows I"], index: int) -> Float[Tensor, "*rows O"]:
        """The product of member ``index``. Members are asked in turn with one ``x``; the first call computes all."""
        if index == 0 or x is not self._input:
            self._input, self._parts = x, self.product(x).split(self.sizes, dim=-1)
        part = self._parts[index]
        if index == len(self.sizes) - 1:
            self._input, self._parts = None, ()
        return part


class PrepackedLinear(nn.Module):
    """``F.linear`` with the weights of ``linear`` prepacked now: later changes of the weights do not show.

    Results differ from the plain product in the last bits (about 1e-6 relative). For use without gradients.
    """

    def __init__(self, linear: nn.Linear, group: PrepackedGroup | None = None, index: int = 0) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight: Tensor
        self.bias: Tensor | None
        # Plain attributes: the weight is the original's parameter, not one of this module.
        self.__dict__["weight"] = linear.weight.detach()
        self.__dict__["bias"] = None if linear.bias is None else linear.bias.detach()
        self.group, self.index = PrepackedGroup([linear]) if group is None else group, index

    def forward(self, x: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        if x.numel() == self.in_features and x.dtype == torch.float32 and not self.group.any_rows:
            return nn.functional.linear(x, self.weight, self.bias)
        return self.group.part(x, self.index)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def prepack_linears(model: nn.Module) -> nn.Module:
    """A decode-only copy of ``model`` in which every ``nn.Linear`` is prepacked; ``model`` itself is untouched.

    Where packing is not possible (see ``can_prepack``) the plain layers stay, so the copy works everywhere.
    """
    prepacked: dict[int, nn.Module] = {}
    for module in model.modules():
        for names in _SIBLINGS:
            siblings = [module._modules.get(name) for name in names]
            if linears := _groupable(siblings):
                group = PrepackedGroup(linears)
                prepacked.update({id(linear): PrepackedLinear(linear, group, i) for i, linear in enumerate(linears)})

    def replace(module: nn.Module) -> nn.Module | None:
        if id(module) in prepacked or not _prepackable(module):
            return prepacked.get(id(module))
        assert isinstance(module, nn.Linear)
        return PrepackedLinear(module)

    return copy_tree(model, replace)


def _prepackable(module: nn.Module | None) -> bool:
    return type(module) is nn.Linear and can_prepack(module.weight)


def _groupable(siblings: list[nn.Module | None]) -> list[nn.Linear]:
    """The siblings, if they are linear layers that one product can serve; else nothing."""
    linears = [module for module in siblings if isinstance(module, nn.Linear) and _prepackable(module)]
    alike = {(linear.in_features, linear.weight.dtype, linear.bias is None) for linear in linears}
    return linears if len(linears) == len(siblings) and len(alike) == 1 else []
