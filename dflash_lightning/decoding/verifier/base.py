"""Contract of verifiers: they decide which drafts are accepted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from dflash_lightning.component import Component
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Drawn, Round, Verdict


class Verifier(Component, ABC, axis=True):
    """Judges a draft by the target's logits at its nodes (row ``k`` of ``logits`` follows node ``k``).

    ``judges`` lists the kinds of drafts for which the verdict is lossless; ``trees`` says whether it judges trees;
    ``repeatable`` whether the output equals plain decoding token for token also above temperature 0.
    """

    judges: ClassVar[frozenset[Drawn]]
    trees: ClassVar[bool] = False
    repeatable: ClassVar[bool] = False
    former: ClassVar[Mapping[str, str]] = {
        "drawn": "judges is the set of all kinds of drafts that it judges",
        "__init__.sampler": "verify is given it",
    }

    @abstractmethod
    def verify(self, draft: Draft, logits: Float[Tensor, "B N V"], where: Round, sampler: Sampler) -> Verdict:
        """The verdict for each row; rows that have ended get one too."""

    def stands(
        self, target: Float[Tensor, "*slots"], drafted: Float[Tensor, "*slots"]
    ) -> Float[Tensor, "*slots"] | None:
        """The chance that a slot's draft is the token with which the text goes on, and stands.

        Given that the drafts before it stand. ``target`` and ``drafted`` [*slots] are what the target's law and that of
        the draft give to this token. Null where it depends on other slots, too.
        """
        return None
