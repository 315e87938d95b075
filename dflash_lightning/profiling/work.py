"""The work that a shape asks for, counted by hand: matrix products by stage, in floating-point operations.

A multiplication with its addition counts as two, as everywhere. Norms, rotations, activations and softmax are not
counted: they are a few operations per number where a product is hundreds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from dflash_lightning.ops.chunks import cut
from dflash_lightning.ops.head_products import chunk_rows, packed_copies
from dflash_lightning.profiling.shape import Shape

Kind = Literal["forward", "input", "weight"]
TRAINED: tuple[Kind, ...] = ("forward", "input", "weight")  # of a layer whose weight and input both get a gradient


@dataclass(frozen=True)
class Product:
    """``times`` products of a linear layer from ``inner`` to ``outer`` numbers, for ``rows`` rows.

    ``kind`` says which of its three: the output ``x W^T``, the input's gradient ``g W``, the weight's ``g^T x``.
    """

    stage: str
    kind: Kind
    rows: int
    inner: int
    outer: int
    times: int = 1

    @property
    def flop(self) -> int:
        """Operations of all of them."""
        return 2 * self.rows * self.inner * self.outer * self.times


@dataclass(frozen=True)
class Work:
    """Products of two matrices, and ``attention``: operations of the small products inside attention, by stage."""

    products: tuple[Product, ...]
    attention: dict[str, int]

    @property
    def flop(self) -> int:
        """All operations."""
        return sum(product.flop for product in self.products) + sum(self.attention.values())

    def by_stage(self) -> dict[str, int]:
        """Operations of every stage that has some."""
        found = dict(self.attention)
        for product in self.products:
            found[product.stage] = found.get(product.stage, 0) + product.flop
        return found

    def __add__(self, other: Work) -> Work:
        both = self.attention | other.attention
        attention = {stage: self.attention.get(stage, 0) + other.attention.get(stage, 0) for stage in both}
        return Work(self.products + other.products, attention)

    def times(self, count: int) -> Work:
        """The same work so often."""
        products = tuple(replace(product, times=product.times * count) for product in self.products)
        return Work(products, {stage: flop * count for stage, flop in self.attention.items()})


def target_pass(shape: Shape, *, rows: int, num_layers: int, seen: int, stage: str | None = "target") -> Work:
    """The target's first ``num_layers`` layers for ``rows`` tokens that see ``seen`` tokens in sum.

    ``stage`` null tells attention and feed-forward parts apart.

    Attention counts the whole square of a row, of which a causal pass needs half: so does torch's own counter.
    """
    width, reading = shape.heads * shape.head_dim, stage or "attention"
    products = (*_attention(shape, reading, rows, num_layers), *_mlp(shape, stage or "mlp", rows, num_layers))
    return Work(products, {reading: num_layers * 2 * 2 * seen * width})


def step_work(shape: Shape, *, seen: int, scored: int, device: str = "cpu") -> Work:
    """One training step of the drafter: forward and backward pass, without the target's pass.

    ``seen`` counts the context rows that blocks see, over all blocks; ``scored`` the slots that are labelled.
    Attention's scores are computed a second time in the backward pass: seven products, two of them in the forward pass.
    """
    slots, tokens = shape.batch * shape.anchors * shape.block, shape.batch * shape.sequence
    layers, width = shape.layers, shape.heads * shape.head_dim
    fused = _products("context", tokens, shape.features * shape.hidden, shape.hidden, 1, ("forward", "weight"))
    context = _products("context", tokens, shape.hidden, shape.kv_heads * shape.head_dim, 2 * layers, TRAINED)
    own = _attention(shape, "attention", slots, layers, TRAINED)
    mlp = _mlp(shape, "mlp", slots, layers, TRAINED)
    read = shape.block * (seen + shape.batch * shape.anchors * shape.block)  # pairs of a slot and what it sees
    head = head_products(shape, scored, device)
    return Work((*fused, *context, *own, *mlp, *head), {"attention": layers * 7 * 2 * read * width})


def head_products(shape: Shape, rows: int, device: str = "cpu") -> list[Product]:
    """The language head's two products over the scored slots, chunk by chunk: the logits, and the slots' gradient."""
    columns = shape.draft_vocab or shape.vocab
    place = torch.device(device)
    packed = packed_copies(place, columns, shape.hidden, 4) > 0
    pieces = cut(rows, chunk_rows(place, columns, itemsize=4, packed=packed, buffers=1))
    sizes = [piece.stop - piece.start for piece in pieces]
    kinds: tuple[Kind, ...] = ("forward", "input")
    return [
        Product("head", kind, size, shape.hidden, columns, sizes.count(size))
        for size in sorted(set(sizes))
        for kind in kinds
    ]


def draft_pass(shape: Shape, *, context_rows: int, seen: int, head: bool = True) -> Work:
    """One block per row in decoding, and the ``context_rows`` new rows that it takes in before, for each of them."""
    slots, tokens, layers = shape.batch * shape.block, shape.batch * context_rows, shape.layers
    context = _products("draft", tokens, shape.features * shape.hidden, shape.hidden, 1)
    context += _products("draft", tokens, shape.hidden, shape.kv_heads * shape.head_dim, 2 * layers)
    block = [*_attention(shape, "draft", slots, layers), *_mlp(shape, "draft", slots, layers)]
    rows = shape.batch * (shape.block - 1)
    last = _products("draft", rows, shape.hidden, shape.draft_vocab or shape.vocab, 1) if head else []
    read = shape.block * (seen + shape.batch * shape.block)
    return Work((*context, *block, *last), {"draft": layers * 4 * read * shape.heads * shape.head_dim})


def verify_pass(shape: Shape, *, rows: int, seen: int, scored: int, stage: str) -> Work:
    """The whole target for ``rows`` tokens, and its head for ``scored`` of them."""
    head = Work(tuple(_products(stage, scored, shape.hidden, shape.vocab, 1)), {})
    return target_pass(shape, rows=rows, num_layers=shape.target_layers, seen=seen, stage=stage) + head


def _attention(shape: Shape, stage: str, rows: int, layers: int, kinds: Sequence[Kind] = ("forward",)) -> list[Product]:
    width, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found = _products(stage, rows, shape.hidden, width, layers, kinds)
    found += _products(stage, rows, shape.hidden, narrow, 2 * layers, kinds)
    return found + _products(stage, rows, width, shape.hidden, layers, kinds)


def _mlp(shape: Shape, stage: str, rows: int, layers: int, kinds: Sequence[Kind] = ("forward",)) -> list[Product]:
    found = _products(stage, rows, shape.hidden, shape.ffn, 2 * layers, kinds)
    return found + _products(stage, rows, shape.ffn, shape.hidden, layers, kinds)


def _products(
    stage: str, rows: int, inner: int, outer: int, times: int, kinds: Sequence[Kind] = ("forward",)
) -> list[Product]:
    return [Product(stage, kind, rows, inner, outer, times) for kind in kinds]
