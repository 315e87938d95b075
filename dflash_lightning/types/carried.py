"""What a round leaves to the next one beside the text: states of drafts that it rejected."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.types.features import TargetFeatures


@dataclass
class Carried:
    """States of rejected drafts, for the blocks of the round after; see ``Conditioning.carry``.

    ``features`` hold what the target computed at the roots and drafts of the round before, row ``r`` at position
    ``positions[b, r]``. Block ``n`` may read rows ``start[b, n] <= r < end[b, n]``; none where the two are equal. Row
    ``start[b, n]`` stands at the position of the block's own slot 0: it is the first rejected draft.

    ``recalled`` holds, for a conditioning that ``recalls``, the drafter's own last hidden state of the round before:
    row ``r`` has the one from which the token after row ``r`` was drafted. Nothing was drafted after the last row.
    """

    features: TargetFeatures
    positions: Int[Tensor, "B R"]
    start: Int[Tensor, "B N"]
    end: Int[Tensor, "B N"]
    recalled: Float[Tensor, "B R H"] | None = None
