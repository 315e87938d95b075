"""Values that pass between the parts of the decoding loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.decoding.law import Law
from dflash_lightning.decoding.repetition import repeats_itself
from dflash_lightning.types import Scores

__all__ = ["Draft", "Drawn", "Generation", "Round", "Scores", "Verdict"]

Drawn = Literal["delta", "sampled"]


@dataclass(frozen=True)
class Round:
    """Where the rows of a batch stand: request ids, the position of each row's root, and the number of the round."""

    requests: Int[Tensor, " B"]
    positions: Int[Tensor, " B"]
    index: int


@dataclass
class Draft:
    """Tokens for the target to judge in one pass: node 0 is the root, the parent of node ``k`` is node ``k - 1``.

    ``drawn`` says how the drafts were chosen: ``delta`` by a rule without chance, ``sampled`` from ``law``, which is
    then exactly the law that node ``k + 1`` was drawn from in row ``k``, warped, over all tokens of the target.
    """

    tokens: Int[Tensor, "B N"]
    drawn: Drawn
    law: Float[Tensor, "B D V"] | None = None


@dataclass
class Verdict:
    """How many drafts of each row stand, and the target's own token after them.

    ``acceptance`` and ``law`` are what chance decided on, where it did: the probability of accepting each draft given
    that the ones before it stand, and the law ``following`` was drawn from. Tests enumerate them; reports average them.
    """

    accepted: Int[Tensor, " B"]
    following: Int[Tensor, " B"]
    acceptance: Float[Tensor, "B D"] | None = None
    law: Law | None = None


@dataclass
class Generation:
    """What one prompt became.

    ``output_ids`` starts with the token that the prefill gives and ends with the first stop token or at the length
    limit; ``committed`` counts the tokens each round added after such cuts, so ``1 + sum(committed) ==
    len(output_ids)``. ``accepted`` is the verifier's count for the same rounds, before cuts.
    """

    request: int
    output_ids: list[int]
    committed: list[int]
    accepted: list[int]
    finish: Literal["stop", "length"] | None = None

    @property
    def repeats_itself(self) -> bool:
        """Whether the answer is a loop or says the same again and again; its stop token does not count."""
        ended = self.finish == "stop"
        return repeats_itself(self.output_ids[:-1] if ended else self.output_ids)
