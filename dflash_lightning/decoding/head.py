"""The language head of decoding: the target's rows, packed where that is faster."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from dflash_lightning.ops.lm_head import LanguageHead
from dflash_lightning.ops.packed_linear import pack_linears


@dataclass(eq=False, kw_only=True)
class DecodingHead(LanguageHead):
    """A language head whose product is made by a module. Frozen rows may be packed once for the CPU (``pack_linears``):
    on the full vocabulary of SmolLM2, seven rows take a third of the time. Compiled graphs cannot hold packed rows."""

    product: nn.Module

    def logits(self, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows V"]:
        return self.activate(self.product(hidden.to(self.weight.device, self.weight.dtype)))


def make_decoding_head(lm: LanguageHead, whole: nn.Module, *, packed: bool) -> DecodingHead:
    """``lm`` for decoding; over the full vocabulary it shares ``whole``, the head that the target decodes with."""
    product = whole
    if lm.ids is not None:
        product = nn.Linear(lm.weight.shape[1], lm.weight.shape[0], bias=lm.bias is not None, device="meta")
        product.weight = nn.Parameter(lm.weight.detach(), requires_grad=False)
        if lm.bias is not None:
            product.bias = nn.Parameter(lm.bias.detach(), requires_grad=False)
        product = pack_linears(product) if packed else product
    return DecodingHead(lm.weight, lm.bias, lm.scale, lm.softcap, lm.ids, lm.embedding, product=product)
