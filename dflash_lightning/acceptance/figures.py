"""What is expected of decoding a set of responses, as sums that add up over documents, domains and ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.acceptance.recursion import expected_rounds, round_chances, rounds_committing, standing


@dataclass(frozen=True)
class ResponseRounds:
    """One response: number of its document, tokens that rounds commit, and how many rounds are expected for them."""

    document: int
    committed: int
    rounds: float


@dataclass
class ExpectedRounds:
    """Sums over responses; every figure is a ratio of sums, as those of ``DecodeStats`` are.

    ``committed`` counts tokens behind the first one of each response, which rounds commit; ``own`` those of them that
    the target's served law could have written itself (all of them, if the texts are what they should be). ``rounds``
    is the expected number of rounds, ``smooth_rounds`` its other estimate (NaN where it was not asked for).
    ``committing[k]`` is the expected number of rounds that commit more than ``k`` tokens; of these, ``stood[k]`` have
    their draft of slot ``k`` stand. ``cut`` responses end without a stop token. ``each`` is of this rank only.
    """

    num_drafts: int
    responses: int = 0
    committed: int = 0
    own: int = 0
    cut: int = 0
    rounds: float = 0.0
    smooth_rounds: float = 0.0
    committing: list[float] = field(default_factory=list)
    stood: list[float] = field(default_factory=list)
    each: list[ResponseRounds] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.committing = self.committing or [0.0] * (self.num_drafts + 1)
        self.stood = self.stood or [0.0] * self.num_drafts

    @classmethod
    def of(
        cls,
        accept: Float[Tensor, "D M K"],
        lengths: Int[Tensor, " D"],
        documents: list[int],
        *,
        own: int,
        cut: int,
        smooth: float = math.nan,
    ) -> ExpectedRounds:
        """The sums of ``D`` responses.

        Args:
            accept: the chance that each draft stands [D, M, K], see ``acceptance.recursion``.
            lengths: tokens of each response [D] that rounds commit.
            documents: number of the document of each.
            own: tokens that the target could have written.
            cut: responses without a stop token.
            smooth: the sum of ``smooth_rounds``.
        """
        omega = round_chances(accept, lengths)
        rounds = expected_rounds(omega).tolist()
        each = [ResponseRounds(*entry) for entry in zip(documents, lengths.tolist(), rounds, strict=True)]
        return cls(
            accept.shape[2],
            responses=len(each),
            committed=int(lengths.sum()),
            own=own,
            cut=cut,
            rounds=math.fsum(rounds),
            smooth_rounds=smooth,
            committing=rounds_committing(omega).sum(0).tolist(),
            stood=standing(omega, accept).sum(0).tolist(),
            each=each,
        )

    @property
    def tau(self) -> float:
        """Expected tokens per round: ``committed / rounds``, a ratio of sums (EDR's MAL is the same of whole texts)."""
        return self.committed / self.rounds if self.rounds else math.nan

    @property
    def smooth_tau(self) -> float:
        """``tau`` by the estimate that varies less."""
        return self.committed / self.smooth_rounds if self.smooth_rounds else math.nan

    @property
    def conditional_acceptance(self) -> list[float]:
        """Share of drafts that stand in each slot, of those that are judged: weighted by where rounds come."""
        return [s / r if r else math.nan for s, r in zip(self.stood, self.committing, strict=False)]

    @property
    def own_share(self) -> float:
        """Share of tokens that the served law could have written; below 1 the texts are not this target's."""
        return self.own / self.committed if self.committed else math.nan

    def __add__(self, other: ExpectedRounds) -> ExpectedRounds:
        assert self.num_drafts == other.num_drafts, "figures of different draft lengths do not add up"
        total = self.unpack(self.num_drafts, self.pack() + other.pack())
        total.each = [*self.each, *other.each]
        return total

    def pack(self) -> Float[Tensor, " Q"]:
        """All sums as one vector [2 K + 7], for a sum over ranks; ``each`` stays behind."""
        numbers = [float(getattr(self, name)) for name in _SUMS]
        return torch.tensor([*numbers, *self.committing, *self.stood], dtype=torch.float64)

    @classmethod
    def unpack(cls, num_drafts: int, vector: Float[Tensor, " Q"]) -> ExpectedRounds:
        """The inverse of ``pack`` [2 K + 7]."""
        values = vector.tolist()
        count = len(_SUMS)
        sums: dict[str, Any] = dict(zip(_SUMS, values[:count], strict=True))
        sums |= {name: round(sums[name]) for name in _COUNTS}
        middle = count + num_drafts + 1
        return cls(num_drafts, **sums, committing=values[count:middle], stood=values[middle:])

    def summary(self) -> dict[str, Any]:
        """The figures of a report, by name; NaN is written as null."""
        smooth = None if math.isnan(self.smooth_tau) else self.smooth_tau
        return {
            "tau": None if math.isnan(self.tau) else self.tau,
            "smooth_tau": smooth,
            "rounds": self.rounds,
            "committed": self.committed,
            "responses": self.responses,
            "cut": self.cut,
            "own_share": None if math.isnan(self.own_share) else self.own_share,
            "conditional_acceptance": [None if math.isnan(x) else x for x in self.conditional_acceptance],
        }


_COUNTS = ("responses", "committed", "own", "cut")
_SUMS = tuple(f.name for f in fields(ExpectedRounds) if f.type in ("int", "float") and f.name != "num_drafts")
