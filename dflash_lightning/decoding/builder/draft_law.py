"""The laws that drafts are drawn from, over the target's token ids."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.decoding.law import Law
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.types import token_ids


def draft_law(logits: Float[Tensor, "B D v"], ids: Int[Tensor, "*slots v"] | None, sampler: Sampler) -> Law:
    """The warped law of each slot; column ``c`` of ``logits`` stands for token ``ids[..., c]``, or for token ``c``."""
    law = sampler.law(logits)
    if ids is None:
        return law
    if law.ids is None:
        return Law(law.mass, ids.expand(law.mass.shape))
    return Law(law.mass, token_ids(law.ids, ids))
