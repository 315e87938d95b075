"""One pass over the logits of a view, chunk by chunk, with the two ways in which gradients are made.

Where the logits are the frozen head on hidden rows, and every request knows its own gradient, the gradient with respect
to the hidden rows is made while a chunk's logits exist; the backward pass only scales it. In all other cases the
backward pass computes every chunk a second time under autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash_lightning.ops.chunks import chunk_bytes, cut
from dflash_lightning.ops.fused import can_fuse
from dflash_lightning.ops.head_products import HeadProducts, chunk_rows
from dflash_lightning.ops.language_head import LanguageHead
from dflash_lightning.ops.requests import Chunk, Request

Compose = Callable[..., Tensor]


@dataclass
class Rooms:
    """What chunks use in turn: the head's products, and memory [r V] for logits, probabilities and a gradient.

    Memory that is given back and taken again costs page faults: some 2 % of a step on a CPU. ``narrow``: logits stay
    in the products' dtype, because everybody who reads them widens them one by one.
    """

    products: HeadProducts
    logits: Tensor
    probs: Tensor
    gradient: Tensor
    narrow: bool


@dataclass(eq=False)
class LogitPass:
    """Which requests are answered, for which rows, in which pieces. Holds no answer, so that a graph may hold it."""

    requests: Sequence[Request]
    rows: Int[Tensor, " R"]
    lm: LanguageHead
    compose: Compose | None
    chunk_rows: int | None

    def __post_init__(self) -> None:
        device = self.rows.device.type
        self.autocast = (torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        self.dtype = self.lm.product_dtype(device)
        self.wide = torch.promote_types(torch.float32, self.dtype)
        self.inputs = tuple(dict.fromkeys(tensor for request in self.requests for tensor in request.inputs))

    def spans(self) -> list[slice]:
        """Runs of rows whose logits, the draft's or the target's, fill a chunk at most."""
        return cut(len(self.rows), self.chunk_rows or max(1, chunk_bytes(self.rows.device) // (4 * self._columns)))

    @property
    def _columns(self) -> int:
        return max(len(self.lm.weight), *(request.columns for request in self.requests))

    def without_autocast(self) -> torch.autocast:
        """A context in which products are computed in the dtype of their inputs."""
        return torch.autocast(self.rows.device.type, enabled=False)

    def chunk(
        self, span: slice, per_row: Sequence[Tensor], shared: Sequence[Tensor], rooms: Rooms | None = None
    ) -> Chunk:
        """The logits of the rows ``span``. They are made of ``per_row`` [r ..] and of ``shared`` (of any shape).

        With ``rooms`` they carry no gradient; without, they take new memory.
        """
        if self.compose is not None:
            dtype, enabled = self.autocast
            with torch.autocast(self.rows.device.type, dtype=dtype, enabled=enabled):
                logits = self.compose(*per_row, *shared).to(self.wide)
            return Chunk(logits, self.rows, span, self.lm)
        # The dtype is decided above, once; autocast would cast the weight again for every chunk.
        with self.without_autocast():
            rows = per_row[0].to(self.dtype)
            if rooms is None or self.lm.bias is not None:
                product = torch.nn.functional.linear(rows, *self.lm.cast(self.dtype))
                return Chunk(self.lm.activate(product.to(self.wide)), self.rows, span, self.lm)
            product = rooms.products.logits(rows, rooms.logits[: len(rows)])
            logits = product if rooms.narrow else self.lm.activate(product.to(self.wide))
            return Chunk(logits, self.rows, span, self.lm, rooms.probs[: len(rows)])

    def answers(self, chunk: Chunk, requests: Sequence[Request]) -> list[Tensor]:
        """The answer of every request [r *width], with its ``fill`` where it has none."""
        with self.without_autocast():
            return [_fill(request, chunk, request.value(chunk)) for request in requests]

    def room(self) -> list[Tensor]:
        """Empty answers for all rows [R *width]."""
        shapes = [(len(self.rows), *request.width) for request in self.requests]
        dtypes = [torch.long if isinstance(request.fill, int) else self.wide for request in self.requests]
        return [self.rows.new_empty(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)]

    @torch.no_grad()
    def values(self, per_row: Sequence[Tensor], shared: Sequence[Tensor]) -> list[Tensor]:
        """The answers alone [R *width], from ``per_row`` [R ..] and ``shared`` (of any shape)."""
        values = self.room()
        for span in self.spans():
            chunk = self.chunk(span, [tensor[span] for tensor in per_row], shared)
            for value, answer in zip(values, self.answers(chunk, self.requests), strict=True):
                value[span] = answer
        return values

    @torch.no_grad()
    def values_and_gradients(self, hidden: Float[Tensor, "R H"]) -> tuple[list[Tensor], list[Tensor]]:
        """The answers [R *width], and for every differentiable one its gradient [R H] with respect to ``hidden``."""
        graded = [request for request in self.requests if request.differentiable]
        values, gradients = self.room(), [hidden.new_empty(hidden.shape, dtype=self.dtype) for _ in graded]
        hidden = hidden.detach().to(self.dtype)
        spans, rooms = self._rooms(hidden)
        for span in spans:
            # In a function of its own: a chunk's logits are given back before the next one's are made.
            self._answer_and_grade(span, hidden[span], rooms, values, dict(zip(graded, gradients, strict=True)))
        return values, gradients

    def _rooms(self, hidden: Float[Tensor, "R H"]) -> tuple[list[slice], Rooms]:
        """The runs of rows of a pass with gradients, and what they use in turn."""
        lm, products = self.lm, self.lm.products(self.dtype)
        plain = lm.bias is None and lm.softcap is None and lm.scale == 1.0
        over = all(request.writes_over for request in self.requests)
        narrow = self.dtype != self.wide and over and plain and can_fuse(hidden)
        size = (self.dtype if narrow else self.wide).itemsize
        buffers = 1 if over and len(self.requests) == 1 and can_fuse(hidden) else 3
        rows = chunk_rows(hidden.device, self._columns, itemsize=size, packed=products.packed, buffers=buffers)
        spans = cut(len(self.rows), self.chunk_rows or rows)
        shape = max([s.stop - s.start for s in spans], default=0), len(lm.weight)
        logits, probs, part = (hidden.new_empty(shape, dtype=dtype) for dtype in (self.dtype, self.wide, self.wide))
        return spans, Rooms(products, logits, probs, part, narrow)

    def _answer_and_grade(
        self,
        span: slice,
        hidden: Float[Tensor, "r H"],
        rooms: Rooms,
        values: Sequence[Tensor],
        gradients: dict[Request, Tensor],
    ) -> None:
        """Write the chunk's share of ``values`` [R *width] and, by differentiable request, ``gradients`` [R H]."""
        chunk, last = self.chunk(span, [hidden], (), rooms), [*gradients][-1]
        for value, answer in zip(values, self.answers(chunk, self.requests), strict=True):
            value[span] = answer
        with self.without_autocast():
            for request, gradient in gradients.items():
                # The last one may have the logits' memory: nothing reads them afterwards, unless they are capped.
                over = request is last and request.writes_over and self.lm.softcap is None
                part = chunk.stored if over else rooms.gradient[: len(hidden)]
                request.gradient(chunk, part)
                rooms.products.back(self._through_head(part, chunk).to(self.dtype), gradient[span])
                _blank(request, chunk, gradient[span])

    def _through_head(self, gradient: Float[Tensor, "r V"], chunk: Chunk) -> Float[Tensor, "r V"]:
        """From d/d logits to d/d (weight @ h): back through soft cap and scale, in place."""
        if self.lm.softcap is not None:
            gradient.mul_(1.0 - (chunk.logits / self.lm.softcap).square_())
        return gradient if self.lm.scale == 1.0 else gradient.mul_(self.lm.scale)

    def gradients(
        self, per_row: Sequence[Tensor], shared: Sequence[Tensor], incoming: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Gradients of ``per_row``, ``shared`` and ``inputs``, each of its tensor's shape; the chunks are made anew.

        ``incoming`` are the gradients of the answers [R *width], null where there is none.
        """
        live = self._live(incoming)
        wanting = [(request, g) for request, g in zip(self.requests, incoming, strict=True) if g is not None]
        to_rows = [torch.zeros_like(tensor) if tensor.requires_grad else None for tensor in per_row]
        common = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in shared]
        wanted = {tensor: torch.zeros_like(tensor) for tensor in [*common, *self.inputs] if tensor.requires_grad}
        for span in self.spans():
            # Rows without an incoming gradient are blanked: whatever they hold, NaN too, reaches nothing.
            given = [torch.where(_like(live[span], tensor), tensor.detach()[span], 0) for tensor in per_row]
            leaves = [g.requires_grad_(tensor.requires_grad) for g, tensor in zip(given, per_row, strict=True)]
            with torch.enable_grad():
                answers = self.answers(self.chunk(span, leaves, common), [request for request, _ in wanting])
            pairs = [(a, g[span]) for a, (_, g) in zip(answers, wanting, strict=True) if a.requires_grad]
            sources = [leaf for leaf in leaves if leaf.requires_grad] + list(wanted)
            if not pairs:
                continue
            outputs, weights = zip(*pairs, strict=True)
            found = iter(torch.autograd.grad(outputs, sources, weights, allow_unused=True))
            for total in to_rows:
                if total is not None and (part := next(found)) is not None:
                    total[span] = part
            for total, part in zip(wanted.values(), found, strict=True):
                if part is not None:
                    total += part
        for tensor in self.inputs:
            if tensor in wanted:
                wanted[tensor] = self._only(live, wanted[tensor])
        return [*to_rows, *(wanted.get(tensor) for tensor in [*common, *self.inputs])]

    def _live(self, incoming: Sequence[Tensor | None]) -> Bool[Tensor, " R"]:
        live = torch.zeros(len(self.rows), dtype=torch.bool, device=self.rows.device)
        for gradient in incoming:
            if gradient is not None:
                live |= (gradient != 0).flatten(1).any(1) if gradient.dim() > 1 else gradient != 0
        return live

    def _only(self, live: Bool[Tensor, " R"], gradient: Float[Tensor, "B N K"]) -> Float[Tensor, "B N K"]:
        """The gradient at live rows, 0 at all other slots."""
        slots = torch.zeros(gradient.numel(), dtype=torch.bool, device=gradient.device)
        return torch.where(slots.index_copy(0, self.rows, live).view(gradient.shape), gradient, 0.0)


def _like(rows: Bool[Tensor, " r"], tensor: Shaped[Tensor, R * rest]) -> Bool[Tensor, r * ones]:
    return rows.view(-1, *[1] * (tensor.dim() - 1))


def _fill(request: Request, chunk: Chunk, value: Shaped[Tensor, r * width]) -> Shaped[Tensor, r * width]:
    known = request.answerable(chunk)
    return value if known is None else value.masked_fill(~_like(known, value), request.fill)


def _blank(request: Request, chunk: Chunk, gradient: Float[Tensor, "r H"]) -> None:
    known = request.answerable(chunk)
    if known is not None:
        gradient.masked_fill_(~known[:, None], 0.0)


class FrozenAnswers(torch.autograd.Function):
    """Answers per row [R *width] whose gradients with respect to ``hidden`` [R H] were made in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, run: LogitPass) -> tuple[Tensor, ...]:
        values, gradients = run.values_and_gradients(hidden)
        ctx.differentiable = [request.differentiable for request in run.requests]
        ctx.dtype = hidden.dtype
        ctx.save_for_backward(*gradients)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(v for v, yes in zip(values, ctx.differentiable, strict=True) if not yes))
        return tuple(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, None]:
        graded = [g for g, yes in zip(incoming, ctx.differentiable, strict=True) if yes]
        total: Tensor | None = None
        for grad, stored in zip(graded, ctx.saved_tensors, strict=True):
            if grad is None:
                continue
            part = torch.where(grad[:, None] != 0, grad[:, None] * stored, 0.0)
            total = part if total is None else total + part
        return (None if total is None else total.to(ctx.dtype)), None


class RecomputedAnswers(torch.autograd.Function):
    """Answers per row [R *width] whose chunks are computed a second time in the backward pass.

    The arguments are the view's per-row tensors, ``num_rows`` of them, its shared ones and ``run.inputs``.
    """

    @staticmethod
    def forward(ctx: Any, run: LogitPass, num_rows: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        # The inputs are the requests' own, which are read from there.
        per_row, shared = tensors[:num_rows], tensors[num_rows : len(tensors) - len(run.inputs)]
        values = run.values(per_row, shared)
        ctx.run, ctx.num_rows = run, num_rows
        ctx.save_for_backward(*per_row, *shared)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(v for v, r in zip(values, run.requests, strict=True) if not r.differentiable))
        return tuple(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        per_row, shared = ctx.saved_tensors[: ctx.num_rows], ctx.saved_tensors[ctx.num_rows :]
        return None, None, *ctx.run.gradients(per_row, shared, incoming)
