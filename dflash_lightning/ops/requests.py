"""Per-slot questions about draft distributions: each knows its value and its gradient from a chunk of logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from dflash_lightning.ops.language_head import LanguageHead

# exp(-60) is nothing beside 1, in float64 too; without a floor the far tail of a peaked distribution turns into
# denormal numbers, which made the softmax 10x and the gradient product 30x slower on an AVX-512 machine.
LOG_FLOOR = -60.0


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
