"""Per-slot questions about draft distributions, answered from a chunk of logits: what they share, and the plain ones.

Questions that compare the draft with the target are in ``ops.comparisons``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from dflash_lightning.ops.fused import can_fuse, softmax_sums, softmax_write
from dflash_lightning.ops.language_head import LanguageHead

# exp(-60) is nothing beside 1, in float64 too; without a floor the far tail of a peaked distribution turns into
# denormal numbers, which made the softmax 10x and the gradient product 30x slower on an AVX-512 machine.
LOG_FLOOR = -60.0


class Chunk:
    """Logits of a run of a view's rows, and what several requests share about them.

    ``all_rows`` are the flat slot indices (into B*N*K) of the whole view, ``rows`` those of these logits, which stand
    at ``span`` of them; ``logits`` are scaled and capped. They are handed out in fp32 (or wider), also where they are
    ``stored`` in less. Nothing that a chunk hands out may be written to. Where the logits carry a gradient, so does all
    that is made of them. ``room`` is memory that ``probs`` may take; null takes new.
    """

    def __init__(
        self,
        logits: Float[Tensor, "r V"],
        all_rows: Int[Tensor, " R"],
        span: slice,
        head: LanguageHead,
        room: Float[Tensor, "r V"] | None = None,
    ) -> None:
        self.stored = logits
        self.all_rows = all_rows
        self.span = span
        self.head = head
        self._room = room
        self._known: dict[Hashable, Any] = {}

    @property
    def rows(self) -> Int[Tensor, " r"]:
        """Flat slot indices of the chunk's rows."""
        return self.all_rows[self.span]

    @cached_property
    def logits(self) -> Float[Tensor, "r V"]:
        """All logits; ``logit_at`` reads single ones for less."""
        return self.stored.to(torch.promote_types(torch.float32, self.stored.dtype))

    def logit_at(self, columns: Int[Tensor, " r"]) -> Float[Tensor, " r"]:
        """One logit of each row."""
        found = self.stored.gather(1, columns[:, None]).squeeze(1)
        return found.to(torch.promote_types(torch.float32, found.dtype))

    @cached_property
    def _sums(self) -> tuple[Float[Tensor, " r"], Float[Tensor, " r"]] | None:
        """Largest logit of every row, and what the exponentials of the distances from it add up to, by ``ops.fused``.

        Null where that cannot be used.
        """
        fused = not self.stored.requires_grad and self.stored.is_contiguous() and can_fuse(self.stored)
        return softmax_sums(self.stored, LOG_FLOOR) if fused and self.stored.numel() else None

    @cached_property
    def _normalised(self) -> tuple[Float[Tensor, "r V"], Float[Tensor, " r"]]:
        if self.logits.requires_grad:  # autograd forbids the shorter way, which works in place
            log_normaliser = self.logits.logsumexp(-1)
            return (self.logits - log_normaliser[:, None]).clamp(min=LOG_FLOOR).exp(), log_normaliser
        top = self.logits.amax(-1, keepdim=True)
        probs = torch.sub(self.logits, top, out=self._room).clamp_(min=LOG_FLOOR).exp_()
        total = probs.sum(-1, keepdim=True)
        return probs.div_(total), (top + total.log()).squeeze(-1)

    @cached_property
    def probs(self) -> Float[Tensor, "r V"]:
        """Softmax of the logits."""
        if self._sums is None:
            return self._normalised[0]
        room = torch.empty_like(self.logits) if self._room is None else self._room
        self.write_probs(torch.ones_like(self.log_normaliser), room)
        return room

    @cached_property
    def log_normaliser(self) -> Float[Tensor, " r"]:
        """Log-sum-exp of the logits."""
        if self._sums is None:
            return self._normalised[1]
        top, total = self._sums
        return top + total.log()

    def write_probs(self, factor: Float[Tensor, " r"], out: Float[Tensor, "r V"]) -> None:
        """``out = factor * probs``, a factor for each row.

        ``out`` may be the memory of the logits, if nothing is asked of this chunk afterwards.
        """
        if self._sums is None:
            torch.mul(self.probs, factor[:, None], out=out)
        else:
            top, total = self._sums
            softmax_write(self.stored, top, factor / total, LOG_FLOOR, out)

    def remember(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` returns, made once per chunk and ``key``."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def at(self, temperature: float) -> Chunk:
        """The same rows with their logits divided by ``temperature``."""
        if temperature == 1.0:
            return self

        def make() -> Chunk:
            return Chunk(self.logits / temperature, self.all_rows, self.span, self.head)

        return self.remember(("at", temperature), make)

    def pick(self, slots: Shaped[Tensor, "B N K *rest"]) -> Shaped[Tensor, r * rest]:
        """The entries of a per-slot tensor at the rows of this chunk."""
        return slots.flatten(0, 2)[self.rows]


class Request(ABC):
    """A per-slot question about the distributions of a view: one number per row, or ``width`` of them.

    ``value`` answers it from a chunk of logits in plain differentiable torch. That is enough: the chunk is then
    computed a second time in the backward pass. A request that also overrides ``gradient`` has its gradient made in the
    forward pass, which is cheaper, wherever the view allows it (see ``ops.lm_head.View``).

    Rows that a request cannot answer (``answerable``) hold ``fill`` and pass no gradient, like slots that are no rows
    of the view. Requests are compared by value, and tensors in them by identity: equal ones are answered once per view.
    """

    fill: ClassVar[float | int] = 0.0
    differentiable: ClassVar[bool] = True
    in_place: ClassVar[bool] = False  # whether this class's own ``gradient`` may be told to write over the logits

    @abstractmethod
    def value(self, chunk: Chunk) -> Shaped[Tensor, r * width]:
        """The answers, floating in the dtype of the logits or integer."""

    def gradient(self, chunk: Chunk, out: Float[Tensor, "r V"]) -> None:
        """Write d value / d logits into ``out``, a buffer of the request's own. Optional; for answers of width ()."""
        raise NotImplementedError

    @property
    def has_gradient(self) -> bool:
        """Whether ``gradient`` is overridden."""
        return type(self).gradient is not Request.gradient

    @property
    def writes_over(self) -> bool:
        """Whether ``gradient`` may write over the logits: ``in_place`` says so where ``gradient`` is defined."""
        owner = next(kind for kind in type(self).__mro__ if "gradient" in vars(kind))
        return bool(vars(owner).get("in_place", False))

    @property
    def width(self) -> tuple[int, ...]:
        """Shape of the answer of one row; ``()`` is a single number."""
        return ()

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Per-slot tensors ``[B, N, K]`` that the value depends on and that may carry a gradient."""
        return ()

    @property
    def columns(self) -> int:
        """Numbers per row, besides the view's logits, that exist while the request is answered: sets the chunk size."""
        return 0

    def answerable(self, chunk: Chunk) -> Bool[Tensor, " r"] | None:
        """Rows that can be answered; ``None`` means all."""
        return None

    def _key(self) -> tuple[Hashable, ...]:
        values = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]
        return (type(self), *(id(value) if isinstance(value, Tensor) else value for value in values))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Request) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


@dataclass(frozen=True, eq=False)
class Detached(Request):
    """The answer to ``request`` without a gradient, so that none is made: for weights and labels of a loss."""

    request: Request
    differentiable: ClassVar[bool] = False

    @property
    def width(self) -> tuple[int, ...]:
        return self.request.width

    @property
    def columns(self) -> int:
        return self.request.columns

    def value(self, chunk: Chunk) -> Shaped[Tensor, r * width]:
        assert self.request.differentiable, "this request has no gradient as it is"
        return self.request.value(chunk).detach()

    def answerable(self, chunk: Chunk) -> Bool[Tensor, " r"] | None:
        return self.request.answerable(chunk)


@dataclass(frozen=True, eq=False)
class LabelLogProb(Request):
    """Log-probability (nats) of each slot's label: the data's own token, the target's likeliest, or any other id.

    0 without gradient where a reduced head has no row for the label. ``temperature`` divides the logits first.
    """

    labels: Int[Tensor, "B N K"]
    temperature: float = 1.0
    in_place: ClassVar[bool] = True

    def _columns(self, chunk: Chunk) -> tuple[Int[Tensor, " r"], Bool[Tensor, " r"]]:
        return chunk.head.columns(chunk.pick(self.labels))

    def value(self, chunk: Chunk) -> Float[Tensor, " r"]:
        return _log_prob(chunk.at(self.temperature), self._columns(chunk)[0])

    def gradient(self, chunk: Chunk, out: Float[Tensor, "r V"]) -> None:
        columns, _ = self._columns(chunk)
        chunk = chunk.at(self.temperature)
        missing = -torch.expm1(_log_prob(chunk, columns)) / self.temperature  # 1 - p, exact also where p is near 1
        chunk.write_probs(torch.full_like(missing, -1 / self.temperature), out)
        out.scatter_(1, columns[:, None], missing[:, None].to(out.dtype))

    def answerable(self, chunk: Chunk) -> Bool[Tensor, " r"] | None:
        return self._columns(chunk)[1]


@dataclass(frozen=True, eq=False)
class Entropy(Request):
    """Entropy of each slot's distribution, in nats."""

    def value(self, chunk: Chunk) -> Float[Tensor, " r"]:
        # linalg.vecdot needs no [r, V] product; the distance from the normaliser keeps large logits from cancelling.
        return -torch.linalg.vecdot(chunk.probs, chunk.logits - chunk.log_normaliser[:, None])

    def gradient(self, chunk: Chunk, out: Float[Tensor, "r V"]) -> None:
        torch.sub((chunk.log_normaliser - self.value(chunk))[:, None], chunk.logits, out=out)
        out.mul_(chunk.probs)


@dataclass(frozen=True, eq=False)
class Argmax(Request):
    """Most probable token of each slot, as a token id of the target also under a reduced head; -1 outside the rows."""

    fill: ClassVar[int] = -1
    differentiable: ClassVar[bool] = False

    def value(self, chunk: Chunk) -> Int[Tensor, " r"]:
        return _tokens(chunk, chunk.logits.argmax(-1))


@dataclass(frozen=True, eq=False)
class TopK(Request):
    """The ``k`` most probable tokens of each slot, best first, as token ids of the target; -1 outside the rows."""

    k: int
    fill: ClassVar[int] = -1
    differentiable: ClassVar[bool] = False

    @property
    def width(self) -> tuple[int, ...]:
        return (self.k,)

    def value(self, chunk: Chunk) -> Int[Tensor, "r k"]:
        return _tokens(chunk, _top(chunk, self.k)[1])


@dataclass(frozen=True, eq=False)
class TopLogits(Request):
    """The logits of what ``TopK`` answers, in its order; 0 outside the rows."""

    k: int
    differentiable: ClassVar[bool] = False

    @property
    def width(self) -> tuple[int, ...]:
        return (self.k,)

    def value(self, chunk: Chunk) -> Float[Tensor, "r k"]:
        return _top(chunk, self.k)[0].detach()


@dataclass(frozen=True, eq=False)
class LogNormaliser(Request):
    """Log-sum-exp of each slot's logits: what a logit is above its log-probability."""

    in_place: ClassVar[bool] = True

    def value(self, chunk: Chunk) -> Float[Tensor, " r"]:
        return chunk.log_normaliser

    def gradient(self, chunk: Chunk, out: Float[Tensor, "r V"]) -> None:
        chunk.write_probs(torch.ones_like(chunk.log_normaliser), out)


@dataclass(frozen=True, eq=False)
class LogitAt(Request):
    """Logits of the candidates ``ids`` of each slot; minus infinity where a reduced head has no row for a candidate."""

    ids: Int[Tensor, "B N K c"]

    @property
    def width(self) -> tuple[int, ...]:
        return (self.ids.shape[-1],)

    def value(self, chunk: Chunk) -> Float[Tensor, "r c"]:
        candidates = chunk.pick(self.ids)
        columns, known = chunk.head.columns(candidates.flatten())
        found = chunk.logits.gather(1, columns.view(candidates.shape))
        return found.masked_fill(~known.view(candidates.shape), -torch.inf)


def _log_prob(chunk: Chunk, columns: Int[Tensor, " r"]) -> Float[Tensor, " r"]:
    """Of one logit of each row."""
    return chunk.logit_at(columns) - chunk.log_normaliser


def _top(chunk: Chunk, k: int) -> tuple[Float[Tensor, "r k"], Int[Tensor, "r k"]]:
    """Values and columns of the largest logits, falling; found once for all who ask."""
    found: tuple[Tensor, Tensor] = chunk.remember(("top", k), lambda: tuple(chunk.logits.topk(k, -1)))
    return found


def _tokens(chunk: Chunk, columns: Int[Tensor, r * k]) -> Int[Tensor, r * k]:
    """Token ids of logit columns."""
    return columns if chunk.head.ids is None else chunk.head.ids[columns]
