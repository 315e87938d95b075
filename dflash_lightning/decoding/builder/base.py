"""What every builder is: from a proposer's scores to the nodes that the target judges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.component import Component
from dflash_lightning.decoding.cost import RoundTimer
from dflash_lightning.decoding.law import Law
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Drawn, Round, Scores
from dflash_lightning.errors import SettingError


class DraftBuilder(Component, ABC, axis=True):
    """Arranges drafts under a root, and says how they were chosen.

    ``drawn`` is compared with what the verifier judges; ``trees`` says whether a node may have several children.
    One with ``lanes`` asks a second drafter for that many blocks per row (``Scores.redraft``); ``second`` says where it
    is: a run folder, a checkpoint or a drafter's folder. ``single_tokens`` says that it asks for laws after tokens
    without a path before them, which only a head without a state has.
    """

    drawn: ClassVar[Drawn]
    trees: ClassVar[bool] = False
    second: str | None = None
    lanes: int = 0
    single_tokens: ClassVar[bool] = False

    @abstractmethod
    def build(self, roots: Int[Tensor, " B"], scores: Scores, where: Round, sampler: Sampler) -> Draft:
        """The draft of each row. Every row has the same number of nodes; those it does not need are not live."""

    def slot_law(
        self, logits: Float[Tensor, "B D v"], ids: Int[Tensor, "*slots v"] | None, sampler: Sampler
    ) -> Law | None:
        """The law of the draft in each slot of a chain, given the tokens before it; null where drafts are no chain.

        Column ``c`` of ``logits`` stands for token ``ids[..., c]``, or for token ``c``.
        """
        return None

    def num_nodes(self, num_drafts: int) -> int:
        """Nodes besides the root at most, where the drafter offers ``num_drafts`` slots; a chain has one per slot."""
        return num_drafts

    def calibrate(self, timer: RoundTimer) -> None:
        """Have measured what the builder goes by, before decoding; by default nothing. May be called again.

        Every decoder works with a copy of the builder, which may keep what it has seen.
        """


def needs_paths(builder: str) -> SettingError:
    """What is said where ``builder`` asks for laws after single tokens, and the drafter knows more of a path."""
    return SettingError(
        "decoding.builder",
        f"{builder} asks for laws after single tokens, but the drafter keeps a state along a path",
        do="Use a builder that follows paths (decoding=tree, or decoding=pctree), or a head that remembers one token",
    )
