"""Judges as many drafts as the head thinks will stand, and a few more."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from dflash_lightning.decoding.policy.base import WidthPolicy
from dflash_lightning.decoding.types import Draft, Round
from dflash_lightning.errors import SettingError


class LengthPolicy(WidthPolicy):
    """Cuts a draft to ``rate`` times the useful share of the block that the head guesses (AdaFlash, arXiv 2607.19223).

    The signal ``length`` ``[B]`` is a share of ``D + 1``: the root and ``D`` drafts. The width is
    ``rate * length * (D + 1)``, rounded up (ours), and then at least ``least`` and at most ``D``. The signal is made
    before any draft is drawn, so that output is distributed as the target's under rejection as well.

    Raises:
        ValueError: ``rate`` is not positive or ``least`` negative, or the head gives no length.
    """

    name = "length"
    sees = "laws"
    reads = ("length",)
    by_block = True

    def __init__(self, *, rate: float = 1.3, least: int = 1) -> None:
        if not rate > 0:
            raise SettingError("decoding.policy.rate", f"{rate} judges nothing", "Use a positive number (1.3)")
        if least < 0:
            raise SettingError("decoding.policy.least", f"{least} is no number of drafts", "Use 0 or more (1)")
        self.rate = rate
        self.least = least

    def width(self, draft: Draft, where: Round) -> Int[Tensor, " B"]:
        if "length" not in draft.signals:
            raise SettingError(
                "decoding.policy",
                f"LengthPolicy reads the signal 'length', but the draft has {sorted(draft.signals)}",
                "Use a drafter whose head gives it (head=length), or set decoding.policy to null",
            )
        depth = int(draft.depth.max()) if draft.parents is not None else draft.tokens.shape[1] - 1
        wanted = self.rate * draft.signals["length"].float() * (depth + 1)
        return wanted.ceil().long().clamp(min=self.least).clamp(max=depth).to(torch.long)
