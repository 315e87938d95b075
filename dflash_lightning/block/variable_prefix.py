"""Blocks that begin with a run of true tokens of random length: for a drafter that goes on where another failed."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dflash_lightning.block.anchored import Anchored, draw_sorted, lay_out
from dflash_lightning.block.check import check_layout
from dflash_lightning.block.masked import draw_uniform
from dflash_lightning.errors import SettingError
from dflash_lightning.types import Alignment, BlockLayout, Document

_LENGTHS = 2  # tells the random bits of lengths from those that choose blocks


class VariablePrefix(Anchored):
    """``Anchored`` blocks whose slots ``0 .. l`` hold true tokens and the rest masks (D2SD, arXiv 2606.04446 sec. 3.4).

    ``l`` is drawn anew for every block: ``Pr(l = j)`` is proportional to ``beta ** j`` for ``j = 0 .. K - 2``. Slots
    behind ``l`` learn the token of their own place, and losses weigh them by their order among these. With ``l = 0`` a
    block is DFlash's.

    ::

        document   0 1 2 3 4 5 6 7 8     anchor 3, block_size 5, l = 2
        slots            3 4 5 M M       read context 0 1 2, learn 6 and 7
    """

    name: ClassVar[str] = "variable_prefix"

    def __init__(
        self,
        *,
        block_size: int = 16,  # slots of a block, the anchor's included
        num_anchors: int = 512,  # blocks drawn per document and epoch
        beta: float | int = 0.8,  # of the law of prefix lengths; 1: all are equally likely
        mask_token_id: int | None = None,  # embedding row fed to slots to be drafted; null chooses an unused one
    ) -> None:
        super().__init__(block_size=block_size, num_anchors=num_anchors, mask_token_id=mask_token_id)
        if not beta > 0:
            raise SettingError("block.beta", f"{beta} gives no law of lengths", "Use a positive number (D2SD: 0.8)")
        self.beta = float(beta)

    def blocks(
        self,
        document: Document,
        alignment: Alignment,
        *,
        seed: int,
        epoch: int,
        vocabulary: Bool[Tensor, " V"] | None = None,
    ) -> BlockLayout:
        eligible, key = self.eligible_anchors(document.loss_mask), (seed, epoch, document.sample_id)
        anchors = draw_sorted(eligible, self.num_anchors, key=key)
        plain = lay_out(document, anchors, alignment, vocabulary)
        told = lay_out(document, anchors, alignment, vocabulary, inputs="tokens")
        bits = draw_uniform(len(eligible), key=(*key, _LENGTHS))[torch.searchsorted(eligible, anchors)]
        bounds = prefix_law(alignment.block_size, self.beta).cumsum(0)
        lengths = torch.searchsorted(bounds, bits, right=True).clamp(max=alignment.block_size - 2)
        behind = torch.arange(alignment.block_size) > lengths[:, None]  # [N, K]
        scored = plain.scored & behind
        layout = replace(
            plain,
            input_ids=torch.where(behind, plain.input_ids, told.input_ids),
            predicts=plain.predicts & behind,
            scored=scored,
            valid=plain.valid & behind,
            rows=scored.flatten().nonzero().squeeze(1),
        )
        check_layout(layout, document.input_ids[None], alignment)
        return layout


def prefix_law(block_size: int, beta: float) -> Float[Tensor, " J"]:
    """Chances of ``l = 0 .. block_size - 2``: a geometric law, cut off."""
    weights = beta ** torch.arange(block_size - 1, dtype=torch.float64)
    return weights / weights.sum()
