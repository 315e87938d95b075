"""The proposer of drafters that are run token by token: every draft is a forward of its own."""

from __future__ import annotations

from typing import Any

from jaxtyping import Int
from torch import Tensor

from dflash_lightning.decoding.draft_proposer import DraftProposer
from dflash_lightning.decoding.types import Round
from dflash_lightning.ops.context import DraftCache
from dflash_lightning.types import Scores, TargetFeatures


class SequentialProposer(DraftProposer):
    """Takes in context as ``DraftProposer`` does; its scores' ``step`` runs the drafter.

    Nothing is compiled: the keys and values of a lane grow from step to step, and a tree asks for another number of
    lanes at every depth. So ``compiled`` is false whatever was asked for, and rows of a batch are not padded.
    """

    def __init__(self, *args: Any, compile: bool, **kwargs: Any) -> None:
        super().__init__(*args, compile=False, **kwargs)

    def compile_if_it_pays(self, new_tokens: int) -> None:
        """Nothing is ever compiled."""

    def _make_steps(self) -> None:
        def absorb(rows: TargetFeatures, keep: Tensor) -> None:
            self.model.extend_cache(rows, keep, self.cache, self.lm)

        self._absorb, self._step = absorb, self._open

    def propose(self, roots: Int[Tensor, " B"], where: Round) -> Scores:
        assert self._step is not None, "warm_up comes before decoding"
        self._take_in_skipped()
        return self._open(roots)

    def _open(self, roots: Int[Tensor, " B"]) -> Scores:
        rows = len(roots)
        cache = DraftCache(self.cache.cursor[:rows], {name: x[:rows] for name, x in self.cache.tensors.items()})
        features = self.round_rows.map(lambda x: x[:rows])
        return self.model.open_in_turn(roots, self.num_drafts, features, self.keep[:rows], cache, self.lm)
