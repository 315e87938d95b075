"""The target's output projection, whole or over a reduced vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dflash_lightning.ops.head_products import HeadProducts, packed_copies


@dataclass(eq=False)
class LanguageHead:
    """The target's output projection: ``logits = cap(scale * (weight @ h + bias))``.

    ``ids`` is null for the full vocabulary; otherwise row ``j`` of ``weight`` stands for token ``ids[j]`` (sorted).
    ``softcap`` c means ``c * tanh(x / c)``, applied last. The rows are the target's own, so nothing here is trained;
    gradients flow through to the hidden states. ``embedding`` are the rows of the target's input embedding, as stored
    and never reduced: heads that read drafted tokens ask ``embed`` for them.
    """

    weight: Float[Tensor, "V H"]
    bias: Float[Tensor, " V"] | None = None
    scale: float = 1.0
    softcap: float | None = None
    ids: Int[Tensor, " V"] | None = None
    embedding: Float[Tensor, "Ve H"] | None = None
    _casts: dict[torch.dtype, tuple[int, Tensor]] = field(default_factory=dict, init=False, repr=False)
    _products: dict[torch.dtype, tuple[int, HeadProducts]] = field(default_factory=dict, init=False, repr=False)

    def restrict(self, ids: Int[Tensor, " v"]) -> LanguageHead:
        """The same head over the tokens ``ids`` only (a copy of their rows)."""
        ids = ids.to(self.weight.device)
        assert bool((ids[1:] > ids[:-1]).all()), "ids of a reduced head must be sorted and distinct"
        columns, known = self.columns(ids)
        assert bool(known.all()), f"tokens {ids[~known].tolist()[:8]} have no row in this head"
        bias = None if self.bias is None else self.bias.detach()[columns]
        return LanguageHead(self.weight.detach()[columns], bias, self.scale, self.softcap, ids, self.embedding)

    def logits(self, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows V"]:
        """Full logits, in the dtype of the weight (autocast's where it is on); for decoding and tests."""
        weight, bias = self.cast(self.product_dtype(hidden.device.type))
        with torch.autocast(hidden.device.type, enabled=False):  # it would cast the weight at every call
            return self.activate(torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias))

    def product_dtype(self, device: str) -> torch.dtype:
        """What the product is made in: autocast's dtype where it is on (it leaves float64 alone), else the weight's."""
        if torch.is_autocast_enabled(device) and self.weight.dtype != torch.float64:
            return torch.get_autocast_dtype(device)
        return self.weight.dtype

    def embed(self, tokens: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows H"]:
        """Raw rows of the input embedding, without the factor that some families apply inside the model.

        ``tokens`` are ids of the target, also where the head is reduced. The rows carry no gradient.
        """
        assert self.embedding is not None, "this head was made without the target's embedding"
        with torch.no_grad():
            return torch.nn.functional.embedding(tokens.to(self.embedding.device), self.embedding)

    def activate(self, product: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
        """Scale and soft cap, the only place where they are applied."""
        if self.scale != 1.0:
            product = product * self.scale
        return product if self.softcap is None else torch.tanh(product / self.softcap) * self.softcap

    def columns(self, tokens: Int[Tensor, " n"]) -> tuple[Int[Tensor, " n"], Bool[Tensor, " n"]]:
        """Logit columns of ``tokens`` and whether each has one; a token without a column is given some other's."""
        if self.ids is None:
            known = (tokens >= 0) & (tokens < len(self.weight))
            return tokens.clamp(0, len(self.weight) - 1), known
        columns = torch.searchsorted(self.ids, tokens).clamp(max=len(self.ids) - 1)
        return columns, self.ids[columns] == tokens

    def cast(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Weight [c H] and bias [c] in ``dtype``, cast once and kept: autocast would cast at every product."""
        bias = None if self.bias is None else self.bias.detach().to(dtype)
        if dtype == self.weight.dtype:
            return self.weight.detach(), bias
        if dtype not in self._casts or self._casts[dtype][0] != self._version:
            self._casts[dtype] = (self._version, self.weight.detach().to(dtype))
        return self._casts[dtype][1], bias

    def products(self, dtype: torch.dtype) -> HeadProducts:
        """The products of training steps in ``dtype``, whose weights are laid out once and kept."""
        if dtype not in self._products or self._products[dtype][0] != self._version:
            # Where both copies are laid out, nobody reads the plain one afterwards.
            columns, width = self.weight.shape
            twice = packed_copies(self.weight.device, columns, width, dtype.itemsize) == 2
            weight = self.weight.detach().to(dtype) if twice else self.cast(dtype)[0]
            self._products[dtype] = (self._version, HeadProducts(weight))
        return self._products[dtype][1]

    @property
    def _version(self) -> int:
        return 0 if self.weight.is_inference() else self.weight._version
