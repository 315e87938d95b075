"""Draft distributions, asked per-slot questions in chunks so that full logits never exist in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from dflash_lightning.ops.candidates import Candidates
from dflash_lightning.ops.chunks import chunk_bytes
from dflash_lightning.ops.comparisons import JSD, KL, Overlap, Renyi, SoftLabelLogProb, TeacherLogProb
from dflash_lightning.ops.language_head import LanguageHead
from dflash_lightning.ops.logit_pass import FrozenAnswers, LogitPass, RecomputedAnswers
from dflash_lightning.ops.requests import (
    Argmax,
    Chunk,
    Detached,
    Entropy,
    LabelLogProb,
    LogitAt,
    LogNormaliser,
    Request,
    TopK,
    TopLogits,
)
from dflash_lightning.ops.teacher import Teacher

__all__ = [
    "JSD",
    "KL",
    "Argmax",
    "Candidates",
    "Chunk",
    "Detached",
    "Entropy",
    "HeadOutput",
    "LabelLogProb",
    "LanguageHead",
    "LogNormaliser",
    "LogitAt",
    "Overlap",
    "Renyi",
    "Request",
    "SoftLabelLogProb",
    "Teacher",
    "TeacherLogProb",
    "TopK",
    "TopLogits",
    "View",
    "chunk_bytes",
]


@dataclass(eq=False)
class View:
    """One draft distribution per row; answers requests about them, chunk by chunk.

    ``per_row`` are tensors ``[R, ...]`` with an entry for each of ``rows``, flat indices into the slots of ``shape``
    ``(B, N, K)``; the hidden states come first. Without ``compose`` the logits are the frozen language head on those.
    With it they are ``compose(*per_row[a run of rows], *shared)``, ``[r, V]`` with one column per row of ``lm``.
    Whatever trainable tensor ``compose`` uses must be handed over in ``shared`` (any shape, the same for all rows),
    else it gets no gradient.

    At most one chunk of logits exists at a time: ``chunk_rows`` rows, by default about 256 MiB, on a CPU 28 to 96. A
    view lives for one step: an answer is kept, so that a second loss or metric asking the same question costs nothing.
    """

    per_row: tuple[Tensor, ...]
    rows: Int[Tensor, " R"]
    shape: tuple[int, ...]
    lm: LanguageHead
    shared: tuple[Tensor, ...] = ()
    compose: Callable[..., Tensor] | None = None
    chunk_rows: int | None = None
    _planned: list[Request] = field(default_factory=list, init=False, repr=False)
    _answers: dict[Request, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        assert all(len(tensor) == len(self.rows) for tensor in self.per_row), "a per-row tensor lacks rows"
        assert self.chunk_rows is None or self.chunk_rows > 0
        if self.compose is None:
            found, width = self.per_row[0].shape[-1], self.lm.weight.shape[1]
            assert found == width, f"hidden rows of {found} for a head of {width}"
            assert len(self.per_row) == 1 and not self.shared, "further tensors have no use without compose"

    @classmethod
    def of(
        cls,
        hidden: Float[Tensor, "B N K H"],
        rows: Int[Tensor, " R"],
        lm: LanguageHead,
        chunk_rows: int | None = None,
    ) -> View:
        """The plain view: the language head on the hidden states of slots ``rows``."""
        shape = tuple(hidden.shape[:3])
        return cls((hidden.flatten(0, 2).index_select(0, rows),), rows, shape, lm, chunk_rows=chunk_rows)

    def plan(self, *requests: Request) -> None:
        """Have ``requests`` answered in the same pass over the logits as the next one asked for."""
        self._planned += requests

    def ask(self, *requests: Request) -> tuple[Shaped[Tensor, "B N K ..."], ...]:
        """The answer to each request in turn: fp32 (float64 under a float64 head) or int64. May be called repeatedly.

        Gradients flow to ``per_row``, ``shared`` and the requests' inputs. Under a plain view they are made while a
        chunk's logits exist, one product per request that knows its gradient; otherwise the chunk is computed again in
        the backward pass. Slots whose incoming gradient is 0 pass exactly 0 on, whatever they hold.
        """
        given, known = requests, {*self._answers, *self._planned, *requests}

        def cheapest(request: Request) -> Request:
            """An answer that is made with its gradient anyway serves those who want none."""
            found = request.request if isinstance(request, Detached) else request
            return found if found in known else request

        requests = tuple(cheapest(request) for request in requests)
        if not all(self._knows(request) for request in requests):
            planned = [cheapest(request) for request in self._planned]
            asked = [r for r in dict.fromkeys([*requests, *planned]) if not self._knows(r)]
            self._planned.clear()
            fast = [r for r in asked if not self._recomputes(r)]
            slow = [r for r in asked if self._recomputes(r)]
            if slow and not any(self._tracks(r) for r in fast):  # one pass for all
                fast, slow = [], asked
            for group, answer in ((fast, self._answer_frozen), (slow, self._answer_recomputed)):
                if group:
                    answers = [self._spread(r, a) for r, a in zip(group, answer(group), strict=True)]
                    self._answers.update(zip(group, answers, strict=True))
        return tuple(
            self._answers[r] if self._tracks(r) and self._tracks(asked_for) else self._answers[r].detach()
            for r, asked_for in zip(requests, given, strict=True)
        )

    def _tracks(self, request: Request) -> bool:
        """Whether the answer must carry a gradient now."""
        tensors = (*self.per_row, *self.shared, *request.inputs)
        return torch.is_grad_enabled() and request.differentiable and any(t.requires_grad for t in tensors)

    def _knows(self, request: Request) -> bool:
        answer = self._answers.get(request)
        return answer is not None and (answer.requires_grad or not self._tracks(request))

    def _recomputes(self, request: Request) -> bool:
        """Whether the answer's gradient needs the chunk once more in the backward pass."""
        if not self._tracks(request):
            return False
        inputs = any(tensor.requires_grad for tensor in request.inputs)
        return self.compose is not None or inputs or not request.has_gradient

    def _pass(self, requests: Sequence[Request]) -> LogitPass:
        return LogitPass(tuple(requests), self.rows, self.lm, self.compose, self.chunk_rows)

    def _answer_frozen(self, requests: Sequence[Request]) -> Sequence[Tensor]:
        run = self._pass(requests)
        if any(self._tracks(request) for request in requests):
            return FrozenAnswers.apply(self.per_row[0], run)
        return run.values(self.per_row, self.shared)

    def _answer_recomputed(self, requests: Sequence[Request]) -> Sequence[Tensor]:
        run = self._pass(requests)
        return RecomputedAnswers.apply(run, len(self.per_row), *self.per_row, *self.shared, *run.inputs)

    def _spread(self, request: Request, answer: Shaped[Tensor, R * width]) -> Shaped[Tensor, "B N K *width"]:
        shape = torch.Size(self.shape)
        empty = answer.new_full((shape.numel(), *request.width), request.fill)
        return empty.index_copy(0, self.rows, answer).view(*shape, *request.width)


@dataclass
class HeadOutput:
    """What a head says of the blocks of a training batch.

    ``views`` are the distributions that losses may ask about, by name; ``"main"`` is the one that is decoded with.
    ``signals`` are numbers per slot ``[B, N, K]`` or per block ``[B, N]`` that policies read when decoding. Each must
    be trained by a loss term that reads it. ``candidates`` are what a head chooses among that takes a few tokens of
    each slot and no others.
    """

    views: dict[str, View]
    signals: dict[str, Tensor] = field(default_factory=dict)
    candidates: Candidates | None = None
