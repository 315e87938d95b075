"""Per-slot questions that compare a draft distribution q with the target's own law p.

With a reduced draft vocabulary q has no mass outside it. Overlaps are then taken with p as it is: that is what
verification accepts. Most divergences would be infinite, so they compare q with p given that the token is one of the
draft's. The one that stays finite (Renyi) takes p as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dflash_lightning.ops.requests import Chunk, Request
from dflash_lightning.ops.teacher import Teacher


class TaughtRequest(Request):
    """A question about the draft's law beside the target's, of which the whole row is read."""

    teacher: Teacher

    @property
    def columns(self) -> int:
        return len(self.teacher.lm.weight)


@dataclass(frozen=True, eq=False)
class TeacherLogProb(TaughtRequest):
    """Log-probability (nats) of each slot's label under the target's whole law; 0 where the label is no token."""

    teacher: Teacher
    labels: Int[Tensor, "B N K"]
    temperature: float = 1.0
    differentiable: ClassVar[bool] = False

    def value(self, chunk: Chunk) -> Float[Tensor, " r"]:
        return self.teacher.log_prob(chunk, self.labels, self.temperature)

    def answerable(self, chunk: Chunk) -> Bool[Tensor, " r"] | None:
        return self.teacher.lm.columns(chunk.pick(self.labels))[1]


@dataclass(frozen=True, eq=False)
class Overlap(TaughtRequest):
    """``sum_v min(a p(v), b q(v))`` of each slot: the chance that a draft is accepted, where both scales are 1.

    ``a`` and ``b`` scale whole rows (null: 1) and may carry gradients.
    """

    teacher: Teacher
    a: Float[Tensor, "B N K"] | None = None
    b: Float[Tensor, "B N K"] | None = None
    temperature: float = 1.0

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(scale for scale in (self.a, self.b) if scale is not None)

    def _scaled(self, chunk: Chunk) -> tuple[Float[Tensor, "r c"], Float[Tensor, "r c"]]:
        p, q = self.teacher.law(chunk, self.temperature).probs, chunk.at(self.temperature).probs
        p = p if self.a is None else p * chunk.pick(self.a)[:, None]
        return p, q if self.b is None else q * chunk.pick(self.b)[:, None]

    def value(self, chunk: Chunk) -> Float[Tensor, " r"]:
        p, q = self._scaled(chunk)
        return torch.where(q < p, q, p).sum(-1)

    def gradient(self, chunk: Chunk, out: Float[Tensor, "r V"]) -> None:
        p, q = self._scaled(chunk)
        torch.mul(q, q < p, out=out)
        # d q_u / d logit_v = q_u (1[u = v] - q_v), where the second q_v is not scaled by b.
        out.sub_(chunk.at(self.temperature).probs * out.sum(-1, keepdim=True))
        if self.temperature != 1.0:
            out.div_(self.temperature)


@dataclass(frozen=True, eq=False)
class KL(TaughtRequest):
    """Kullback-Leibler divergence (nats) of each slot: ``sum p log(p / q)``, or with ``reverse`` ``sum q log(q / p)``.

    Both laws are taken at ``temperature``; the value is not multiplied by its square.
    """

    teacher: Teacher
    reverse: bool = False
    temperature: float = 1.0

    def _difference(self, chunk: Chunk) -> Float[Tensor, "r c"]:
        """``log q - log p``, both within the draft's vocabulary."""
        draft, law = chunk.at(self.temperature), self.teacher.law(chunk, self.temperature)
        return draft.logits - draft.log_normaliser[:, None] - law.log_probs_within

    def value(self, chunk: Chunk) -> Float[Tensor, " r"]:
        difference = self._difference(chunk)
        if self.reverse:
            return torch.linalg.vecdot(chunk.at(self.temperature).probs, difference)
        return -torch.linalg.vecdot(self.teacher.law(chunk, self.temperature).probs_within, difference)

    def gradient(self, chunk: Chunk, out: Float[Tensor, "r V"]) -> None:
        probs = chunk.at(self.temperature).probs
        if self.reverse:
            difference = self._difference(chunk)
            mean = torch.linalg.vecdot(probs, difference)
            torch.mul(probs, difference.sub_(mean[:, None]), out=out)
        else:
            torch.sub(probs, self.teacher.law(chunk, self.temperature).probs_within, out=out)
        if self.temperature != 1.0:
            out.div_(self.temperature)


@dataclass(frozen=True, eq=False)
class JSD(TaughtRequest):
    """Jensen-Shannon divergence (nats) of each slot: the mean divergence of p and q from their mean, at most log 2."""

    teacher: Teacher
    temperature: float = 1.0

    def value(self, chunk: Chunk) -> Float[Tensor, " r"]:
        draft, law = chunk.at(self.temperature), self.teacher.law(chunk, self.temperature)
        log_q = draft.logits - draft.log_normaliser[:, None]
        log_mean = ((law.probs_within + draft.probs) / 2).log()
        from_p = torch.linalg.vecdot(law.probs_within, law.log_probs_within - log_mean)
        return (from_p + torch.linalg.vecdot(draft.probs, log_q - log_mean)) / 2


@dataclass(frozen=True, eq=False)
class SoftLabelLogProb(TaughtRequest):
    """``sum p log q`` (nats) of each slot: minus the cross entropy with the target's law as the label."""

    teacher: Teacher
    temperature: float = 1.0

    def value(self, chunk: Chunk) -> Float[Tensor, " r"]:
        draft, law = chunk.at(self.temperature), self.teacher.law(chunk, self.temperature)
        return torch.linalg.vecdot(law.probs_within, draft.logits - draft.log_normaliser[:, None])

    def gradient(self, chunk: Chunk, out: Float[Tensor, "r V"]) -> None:
        law = self.teacher.law(chunk, self.temperature)
        torch.sub(law.probs_within, chunk.at(self.temperature).probs, out=out)
        if self.temperature != 1.0:
            out.div_(self.temperature)


@dataclass(frozen=True, eq=False)
class Renyi(TaughtRequest):
    """``-2 log sum sqrt(p q)`` (nats) of each slot: Renyi's divergence of order 1/2.

    0 where p is q, at most the smaller of both Kullback-Leibler divergences, and finite wherever they share mass.
    """

    teacher: Teacher
    temperature: float = 1.0

    def _halves(self, chunk: Chunk) -> Float[Tensor, "r c"]:
        """``log sqrt(p q)``: roots of small probabilities would be lost before their logarithm is."""
        draft = chunk.at(self.temperature)
        return (self.teacher.law(chunk, self.temperature).log_probs + draft.logits - draft.log_normaliser[:, None]) / 2

    def value(self, chunk: Chunk) -> Float[Tensor, " r"]:
        return -2.0 * self._halves(chunk).logsumexp(-1)

    def gradient(self, chunk: Chunk, out: Float[Tensor, "r V"]) -> None:
        torch.sub(chunk.at(self.temperature).probs, self._halves(chunk).softmax(-1), out=out)
        if self.temperature != 1.0:
            out.div_(self.temperature)
