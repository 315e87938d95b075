"""The language head of decoding: the target's rows, prepacked where that is faster."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from dflash_lightning.ops.lm_head import LanguageHead
from dflash_lightning.ops.prepacked_linear import prepack_linears


@dataclass(eq=False, kw_only=True)
class DecodingHead(LanguageHead):
    """A language head whose product is made by a module, ``[*rows H]`` to ``[*rows c]``.

    Frozen rows may be prepacked once for the CPU (``prepack_linears``): on the full vocabulary of SmolLM2, seven rows
    take a third of the time. Compiled graphs cannot hold prepacked rows.
    """

    product: nn.Module

    def logits(self, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows V"]:
        return self.activate(self.product(hidden.to(self.weight.device, self.weight.dtype)))


def make_decoding_head(lm: LanguageHead, whole: nn.Module, *, prepacked: bool) -> DecodingHead:
    """``lm`` for decoding; over the full vocabulary it shares ``whole``, the head that the target decodes with."""
    product = whole
    if lm.ids is not None:
        product = nn.Linear(lm.weight.shape[1], lm.weight.shape[0], bias=lm.bias is not None, device="meta")
        product.weight = nn.Parameter(lm.weight.detach(), requires_grad=False)
        if lm.bias is not None:
            product.bias = nn.Parameter(lm.bias.detach(), requires_grad=False)
        product = prepack_linears(product) if prepacked else product
    return DecodingHead(lm.weight, lm.bias, lm.scale, lm.softcap, lm.ids, lm.embedding, product=product)
