"""The frozen language head, asked per-slot questions in chunks so that full logits never exist in training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable

# fp32 logits that exist at a time. On a CPU, glibc gives blocks above 32 MiB back to the system at every free, and the
# page faults of getting them again cost a fifth of the pass.
CHUNK_BYTES = 64 * 2**20
CPU_CHUNK_BYTES = 28 * 2**20

# exp(-60) is nothing beside 1, in float64 too; without a floor the far tail of a peaked distribution turns into
# denormal numbers, which made the softmax 10x and the gradient product 30x slower on an AVX-512 machine.
LOG_FLOOR = -60.0


@dataclass(eq=False)
class LanguageHead:
    """The target's output projection: ``logits = cap(scale * (weight @ h + bias))``.

    ``ids`` is null for the full vocabulary; otherwise row ``j`` of ``weight`` stands for token ``ids[j]`` (sorted).
    ``softcap`` c means ``c * tanh(x / c)``, applied last. The rows are the target's own, so nothing here is trained;
    gradients flow through to the hidden states.
    """

    weight: Float[Tensor, "V H"]
    bias: Float[Tensor, " V"] | None = None
    scale: float = 1.0
    softcap: float | None = None
    ids: Int[Tensor, " V"] | None = None
    _casts: dict[torch.dtype, tuple[int, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def restrict(self, ids: Int[Tensor, " v"]) -> LanguageHead:
        """The same head over the tokens ``ids`` only (a copy of their rows)."""
        ids = ids.to(self.weight.device)
        assert bool((ids[1:] > ids[:-1]).all()), "ids of a reduced head must be sorted and distinct"
        columns, known = self.columns(ids)
        assert bool(known.all()), f"tokens {ids[~known].tolist()[:8]} have no row in this head"
        bias = None if self.bias is None else self.bias.detach()[columns]
        return LanguageHead(self.weight.detach()[columns], bias, self.scale, self.softcap, ids)

    def logits(self, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows V"]:
        """Full logits, in the dtype of the weight (autocast's where it is on); for decoding and tests."""
        product = torch.nn.functional.linear(hidden.to(self.weight.dtype), self.weight.detach(), self.bias)
        return self.activate(product)

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
        """Weight and bias in ``dtype``, cast once and kept: autocast would cast the whole matrix at every product."""
        bias = None if self.bias is None else self.bias.detach().to(dtype)
        if dtype == self.weight.dtype:
            return self.weight.detach(), bias
        version = 0 if self.weight.is_inference() else self.weight._version
        if dtype not in self._casts or self._casts[dtype][0] != version:
            self._casts[dtype] = (version, self.weight.detach().to(dtype))
        return self._casts[dtype][1], bias


class Chunk:
    """Logits of a run of a view's rows, and what several requests share about them.

    ``rows`` are the flat slot indices (into B*N*K) of these logits; ``logits`` are fp32 (or wider), scaled and capped.
    """

    def __init__(self, logits: Float[Tensor, "r V"], rows: Int[Tensor, " r"], head: LanguageHead) -> None:
        self.logits = logits
        self.rows = rows
        self.head = head
        self.last = False  # whether the request being answered is the last to want the probabilities

    @cached_property
    def _normalised(self) -> tuple[Float[Tensor, "r V"], Float[Tensor, " r"]]:
        top = self.logits.amax(-1, keepdim=True)
        probs = (self.logits - top).clamp_(min=LOG_FLOOR).exp_()
        total = probs.sum(-1, keepdim=True)
        return probs.div_(total), (top + total.log()).squeeze(-1)

    @property
    def probs(self) -> Float[Tensor, "r V"]:
        """Softmax of the logits; shared, not to be written to."""
        return self._normalised[0]

    @property
    def log_normaliser(self) -> Float[Tensor, " r"]:
        """Log-sum-exp of the logits."""
        return self._normalised[1]

    def take_probs(self) -> Float[Tensor, "r V"]:
        """The probabilities in a buffer that the caller may overwrite."""
        return self.probs if self.last else self.probs.clone()


class Request(ABC):
    """A per-slot question about the distributions of a view: one number per row.

    ``value`` answers it from a chunk of logits; a differentiable request also knows the ``gradient`` of its value with
    respect to those logits. Rows it cannot answer (``answerable``) hold ``fill`` and pass no gradient, like slots that
    are no rows of the view. Requests are compared by value, tensors by identity: equal ones are answered once per view.
    """

    fill: ClassVar[float | int] = 0.0
    differentiable: ClassVar[bool] = True

    @abstractmethod
    def value(self, chunk: Chunk) -> Shaped[Tensor, " r"]:
        """The answers, floating in the dtype of the logits or integer."""

    def gradient(self, chunk: Chunk) -> Float[Tensor, "r V"]:
        """d value / d logits, in a buffer that the caller may overwrite; called after every request's ``value``."""
        raise NotImplementedError

    def answerable(self, chunk: Chunk) -> Bool[Tensor, " r"] | None:
        """Rows that can be answered; ``None`` means all."""
        return None


@dataclass(frozen=True, eq=False)
class LabelLogProb(Request):
    """Log-probability of each slot's label; 0 without gradient where a reduced head has no row for the label."""

    labels: Int[Tensor, "B N K"]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LabelLogProb) and self.labels is other.labels

    def __hash__(self) -> int:
        return hash((LabelLogProb, id(self.labels)))

    def _columns(self, chunk: Chunk) -> tuple[Int[Tensor, " r"], Bool[Tensor, " r"]]:
        return chunk.head.columns(self.labels.flatten()[chunk.rows])

    def value(self, chunk: Chunk) -> Float[Tensor, " r"]:
        columns, _ = self._columns(chunk)
        return chunk.logits.gather(1, columns[:, None]).squeeze(1) - chunk.log_normaliser

    def gradient(self, chunk: Chunk) -> Float[Tensor, "r V"]:
        columns, _ = self._columns(chunk)
        ones = torch.ones_like(chunk.log_normaliser)[:, None]
        return chunk.take_probs().neg_().scatter_add_(1, columns[:, None], ones)

    def answerable(self, chunk: Chunk) -> Bool[Tensor, " r"] | None:
        return self._columns(chunk)[1]


@dataclass(frozen=True)
class Entropy(Request):
    """Entropy of each slot's distribution, in nats."""

    def value(self, chunk: Chunk) -> Float[Tensor, " r"]:
        # linalg.vecdot needs no [r, V] product; the distance from the normaliser keeps large logits from cancelling.
        return -torch.linalg.vecdot(chunk.probs, chunk.logits - chunk.log_normaliser[:, None])

    def gradient(self, chunk: Chunk) -> Float[Tensor, "r V"]:
        surprise = (chunk.log_normaliser - self.value(chunk))[:, None] - chunk.logits
        return surprise.mul_(chunk.probs)


@dataclass(frozen=True)
class Argmax(Request):
    """Most probable token of each slot, as a token id of the target also under a reduced head; -1 outside the rows."""

    fill: ClassVar[int] = -1
    differentiable: ClassVar[bool] = False

    def value(self, chunk: Chunk) -> Int[Tensor, " r"]:
        columns = chunk.logits.argmax(-1)
        return columns if chunk.head.ids is None else chunk.head.ids[columns]


@dataclass(eq=False)
class View:
    """One draft distribution per slot, known by hidden rows; answers requests about them, chunk by chunk.

    ``rows`` are the slots (flat indices into B*N*K) whose distributions may be asked for. At most one chunk of logits
    exists at a time: ``chunk_rows`` rows, by default about 64 MiB, on a CPU 28. A view lives for one step: an answer is
    kept, so that a second loss or a metric asking the same question costs nothing.
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
        size = CPU_CHUNK_BYTES if weight.device.type == "cpu" else CHUNK_BYTES
        largest = self.view.chunk_rows or max(1, size // (4 * len(weight)))
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
