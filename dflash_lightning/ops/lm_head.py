"""The frozen language head, asked per-slot questions in chunks so that full logits never exist in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash_lightning.ops.language_head import LanguageHead
from dflash_lightning.ops.requests import Argmax, Chunk, Entropy, LabelLogProb, Request

__all__ = ["Argmax", "Chunk", "Entropy", "LabelLogProb", "LanguageHead", "Request", "View"]

# Bytes of fp32 logits that exist at a time. On a GPU that is 440 rows of a vocabulary of 152 000, which keep it busy (a
# gradient is as large again). On a CPU, glibc gives blocks above 32 MiB back to the system at every free, and the page
# faults of getting them again cost a fifth of the pass.
CHUNK_BYTES = 256 * 2**20
CPU_CHUNK_BYTES = 28 * 2**20


def chunk_bytes(device: torch.device) -> int:
    """Bytes of logits that exist at a time on ``device``."""
    return CPU_CHUNK_BYTES if device.type == "cpu" else CHUNK_BYTES


@dataclass(eq=False)
class View:
    """One draft distribution per slot, known by hidden rows; answers requests about them, chunk by chunk.

    ``rows`` are the slots (flat indices into B*N*K) whose distributions may be asked for. At most one chunk of logits
    exists at a time: ``chunk_rows`` rows, by default about 256 MiB, on a CPU 28. A view lives for one step: an answer
    is kept, so that a second loss or a metric asking the same question costs nothing.
    """

    hidden: Float[Tensor, "B N K H"]
    rows: Int[Tensor, " R"]
    lm: LanguageHead
    chunk_rows: int | None = None
    _planned: list[Request] = field(default_factory=list, init=False, repr=False)
    _answers: dict[Request, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        width = self.lm.weight.shape[1]
        assert self.hidden.shape[-1] == width, f"hidden rows of {self.hidden.shape[-1]} for a head of {width}"
        assert self.chunk_rows is None or self.chunk_rows > 0

    def plan(self, *requests: Request) -> None:
        """Have ``requests`` answered in the same pass over the logits as the next one asked for."""
        self._planned += requests

    def scalars(self, *requests: Request) -> tuple[Shaped[Tensor, "B N K"], ...]:
        """The answer to each request in turn: fp32 (float64 under a float64 head) or int64. May be called repeatedly.

        Gradients flow to ``hidden``. The head being frozen, they are made while a chunk's logits exist, one product per
        differentiable request, and the backward pass only scales them. Slots whose incoming gradient is 0 pass exactly
        0 on, whatever they hold.
        """
        with_grad = torch.is_grad_enabled() and self.hidden.requires_grad
        if not all(self._knows(request, with_grad) for request in requests):
            asked = [r for r in dict.fromkeys([*requests, *self._planned]) if not self._knows(r, with_grad)]
            self._planned.clear()
            self._answers.update(zip(asked, self._answer(asked, with_grad), strict=True))
        answers = tuple(self._answers[request] for request in requests)
        return answers if with_grad else tuple(answer.detach() for answer in answers)

    def _knows(self, request: Request, with_grad: bool) -> bool:
        answer = self._answers.get(request)
        return answer is not None and (answer.requires_grad or not (with_grad and request.differentiable))

    def _answer(self, requests: Sequence[Request], with_grad: bool) -> list[Tensor]:
        rows = self.hidden.flatten(0, 2).index_select(0, self.rows)
        chunks = _Chunks(self, rows.shape[0], _product_dtype(self.hidden, self.lm), tuple(requests))
        answers = _Answers.apply(rows, chunks) if with_grad else chunks.answer(rows, with_grad=False)[0]
        return [self._spread(request, answer) for request, answer in zip(requests, answers, strict=True)]

    def _spread(self, request: Request, answer: Shaped[Tensor, " R"]) -> Shaped[Tensor, "B N K"]:
        shape = self.hidden.shape[:3]
        return answer.new_full((shape.numel(),), request.fill).index_copy(0, self.rows, answer).view(shape)


def _product_dtype(hidden: Tensor, lm: LanguageHead) -> torch.dtype:
    """What the product is made in: autocast's dtype where it is on (it leaves float64 alone), else the weight's."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and lm.weight.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return lm.weight.dtype


@dataclass(eq=False)
class _Chunks:
    """One pass over the logits of a view: which requests, in which pieces."""

    view: View
    num_rows: int
    dtype: torch.dtype
    requests: tuple[Request, ...]

    def spans(self) -> list[slice]:
        """Runs of rows of about equal length, none longer than a chunk."""
        weight = self.view.lm.weight
        largest = self.view.chunk_rows or max(1, chunk_bytes(weight.device) // (4 * len(weight)))
        pieces = -(-self.num_rows // largest)
        step = -(-self.num_rows // max(1, pieces))
        return [slice(i, min(i + step, self.num_rows)) for i in range(0, self.num_rows, max(1, step))]

    def answer(self, hidden: Float[Tensor, "R H"], *, with_grad: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Values of every request, and of every differentiable one its gradient with respect to ``hidden``."""
        wide = torch.promote_types(torch.float32, self.dtype)
        weight, bias = self.view.lm.cast(self.dtype)
        graded = [request for request in self.requests if with_grad and request.differentiable]
        values = [hidden.new_empty(self.num_rows, dtype=_answer_dtype(request, wide)) for request in self.requests]
        gradients = [hidden.new_empty(hidden.shape, dtype=self.dtype) for _ in graded]
        hidden = hidden.detach().to(self.dtype)
        # The dtype is decided above, once; autocast would cast the weight again for every chunk.
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            for span in self.spans():
                product = torch.nn.functional.linear(hidden[span], weight, bias)
                chunk = Chunk(self.view.lm.activate(product.to(wide)), self.view.rows[span], self.view.lm)
                del product
                for request, value in zip(self.requests, values, strict=True):
                    value[span] = _fill(request, chunk, request.value(chunk))
                for i, (request, gradient) in enumerate(zip(graded, gradients, strict=True)):
                    chunk.last = i == len(graded) - 1
                    part = self._through_head(request.gradient(chunk), chunk).to(self.dtype)
                    torch.mm(part, weight, out=gradient[span])
                    _blank(request, chunk, gradient[span])
        return values, gradients

    def _through_head(self, gradient: Float[Tensor, "r V"], chunk: Chunk) -> Float[Tensor, "r V"]:
        """From d/d logits to d/d (weight @ h): back through soft cap and scale, in place."""
        lm = self.view.lm
        if lm.softcap is not None:
            gradient.mul_(1.0 - (chunk.logits / lm.softcap).square_())
        return gradient if lm.scale == 1.0 else gradient.mul_(lm.scale)


def _answer_dtype(request: Request, wide: torch.dtype) -> torch.dtype:
    return torch.long if isinstance(request.fill, int) else wide


def _fill(request: Request, chunk: Chunk, value: Shaped[Tensor, " r"]) -> Shaped[Tensor, " r"]:
    known = request.answerable(chunk)
    return value if known is None else value.masked_fill(~known, request.fill)


def _blank(request: Request, chunk: Chunk, gradient: Float[Tensor, "r H"]) -> None:
    known = request.answerable(chunk)
    if known is not None:
        gradient.masked_fill_(~known[:, None], 0.0)


class _Answers(torch.autograd.Function):
    """Per-row answers whose gradients were made in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, chunks: _Chunks) -> tuple[Tensor, ...]:
        values, gradients = chunks.answer(hidden, with_grad=True)
        ctx.differentiable = [request.differentiable for request in chunks.requests]
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
