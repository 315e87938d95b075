"""Blocks where the rounds of a real decoding began, with the drafts that it rejected (Draft-OPD, arXiv 2605.29343)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor

from dflash_lightning.block.anchored import Anchored, lay_out
from dflash_lightning.block.check import check_anchored
from dflash_lightning.types import (
    Alignment,
    BlockLayout,
    DecodedRound,
    Document,
    LabelLayout,
    label_log_probs,
    segments,
)

UNKNOWN = 1.0  # in place of a log-probability that nobody knows


class Recorded(Anchored):
    """Blocks of documents that were decoded, at the places where a draft was rejected and where the answer began.

    Labels are the committed tokens up to the next such place; slots behind it are not valid. Three streams say more of
    every slot: ``teacher`` [N, K] is the target's log-probability of its label (``UNKNOWN`` where there is none),
    ``rejected`` [N, K] a token that was drafted there and rejected (-1: none), and ``rejected_teacher`` [N, K] the
    target's log-probability of it after the drafts before. A slot of the first rejected draft has both.

    ``records`` are rounds by document, set by ``callbacks.Rollout``. Until then blocks are those of ``Anchored`` with
    streams that say nothing. A document that has no rounds, or none that rejects, has no block then.
    """

    name: ClassVar[str] = "recorded"

    def __init__(
        self,
        *,
        block_size: int = 16,  # slots of a block, the anchor's included
        num_anchors: int = 512,  # most blocks per document and epoch, the first ones of its answer
        mask_token_id: int | None = None,  # embedding row fed to slots to be drafted; null chooses an unused one
        label_layout: LabelLayout = "same_position",  # whether slot i predicts its own position or the next one
        suffix: bool = True,  # all rejected drafts of a round are learnt from, else the first one alone
    ) -> None:
        super().__init__(
            block_size=block_size, num_anchors=num_anchors, mask_token_id=mask_token_id, label_layout=label_layout
        )
        self.suffix = suffix
        self.records: Mapping[int, Sequence[DecodedRound]] | None = None

    def blocks(
        self,
        document: Document,
        alignment: Alignment,
        *,
        seed: int,
        epoch: int,
        vocabulary: Bool[Tensor, " V"] | None = None,
    ) -> BlockLayout:
        if self.records is None:
            layout = super().blocks(document, alignment, seed=seed, epoch=epoch, vocabulary=vocabulary)
            layout.streams |= self._streams(layout)
            return layout
        rounds = self.records.get(document.sample_id, ())
        first = int(document.loss_mask.nonzero()[0]) if bool(document.loss_mask.any()) else 0
        length = answer_length(document)
        found = segments(rounds, length, alignment.num_drafts, suffix=self.suffix)[: self.num_anchors]
        anchors = torch.tensor([first + block.anchor for block in found], dtype=torch.long)
        layout = lay_out(document, anchors, alignment, vocabulary)
        layout.streams |= self._streams(layout)
        chances, learnt = label_log_probs(rounds), torch.zeros_like(layout.valid)
        for n, block in enumerate(found):
            for place in range(1, block.last - block.anchor + 1):
                slot = alignment.first_slot + place - 1
                learnt[0, n, slot] = True
                layout.streams["teacher"][0, n, slot] = chances.get(block.anchor + place, UNKNOWN)
            for place, token, chance in block.rejected:
                slot = alignment.first_slot + place - 1
                if bool(layout.scored[0, n, slot]):
                    layout.streams["rejected"][0, n, slot] = token
                    layout.streams["rejected_teacher"][0, n, slot] = chance
        layout.valid &= learnt
        check_anchored(layout, document.input_ids[None], alignment)
        return layout

    def _streams(self, layout: BlockLayout) -> dict[str, Tensor]:
        """Streams that know nothing."""
        unknown = torch.full(layout.labels.shape, UNKNOWN)
        return {"teacher": unknown, "rejected": torch.full_like(layout.labels, -1), "rejected_teacher": unknown.clone()}


def answer_length(document: Document) -> int:
    """Tokens of the first run of supervised tokens: the first answer."""
    mask = document.loss_mask
    if not bool(mask.any()):
        return 0
    rest = mask[int(mask.nonzero()[0]) :]
    return len(rest) if bool(rest.all()) else int((~rest).nonzero()[0])
