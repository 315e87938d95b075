"""What every width policy is: how much of a draft is given to the target to judge."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.component import Component
from dflash_lightning.decoding.types import Draft, Round, Verdict

Sees = Literal["past", "laws", "drawn"]


class WidthPolicy(Component, ABC, axis=True):
    """Cuts drafts before they are judged, so that verification costs less.

    ``sees`` says what a width may depend on: ``past`` rounds only, this round's ``laws`` and signals, or its ``drawn``
    tokens. Under rejection a width must not depend on the draws that it cuts: the output would no longer be distributed
    as the target's. ``laws`` therefore includes the drafts *before* the one that is let in or cut: they are part of the
    condition of its law. ``check_compatible`` refuses ``drawn`` under rejection; where output must match the target's
    own draws, any width is right. ``reads`` names the signals of the head that the policy needs; they are in
    ``draft.signals``. ``reads_ahead`` says that whether a draft is let in also depends on the signals of later ones.
    Signals that depend on drafted tokens then tell of the draft itself, which under rejection is refused, too.

    A policy may keep what it has seen, by row of the batch; every decoder works with a copy of its own.
    """

    sees: ClassVar[Sees]
    reads: ClassVar[tuple[str, ...]] = ()
    reads_ahead: ClassVar[bool] = False
    by_block: ClassVar[bool] = False  # whether these are a number per row [B], else one per draft [B, D]

    def start(self, where: Round) -> None:
        """A new batch begins, so what was kept of the rows of the last one is void; by default nothing is kept."""

    @abstractmethod
    def width(self, draft: Draft, where: Round) -> Int[Tensor, " B"]:
        """The deepest depth of each row that is judged, 0 (the root alone) or more.

        What rows get that have ended is ignored; ``where.live`` says which these are.
        """

    def observe(self, draft: Draft, verdict: Verdict, logits: Float[Tensor, "B N V"]) -> None:
        """Learn from a round that has been judged; by default nothing. ``draft`` is what was left after the cut."""
