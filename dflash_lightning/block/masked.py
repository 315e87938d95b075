"""Blocks that tile a response, with a random share of their slots masked (DFlash's ablation)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dflash_lightning.block.anchored import draw_sorted, tiles
from dflash_lightning.block.base import BlockConstructor
from dflash_lightning.block.check import check_layout
from dflash_lightning.errors import SettingError
from dflash_lightning.types import Alignment, BlockLayout, Document, LabelLayout

_MASKS = 1  # tells the random bits of masks from those that choose blocks


class Masked(BlockConstructor):
    """Blocks at offsets 0, K, 2K, ... of every response, each slot masked with a rate of its block.

    The ablation "uniform blocks, random masks" of DFlash (arXiv 2602.06036), in the manner of BD3LM: every block draws
    a rate uniformly from ``min_rate`` to 1, every slot is masked with that chance, and masked slots, the first one too,
    are what is learned. Unmasked slots hold the true token. Slots beyond the response's end are masked and not scored.
    The weight 1/rate of diffusion language models is left out, and ``min_rate`` is ours: the paper states neither.

    ::

        response   3 4 5 6 7 8 9     block_size 4: blocks at 3 and 7
        slots      3 M 5 M           read context 0 1 2, learn 4 and 6
                   M M 9 M           read context 0 .. 6, learn 7 and 8; the last slot is not scored

    Labels are always those of the slot's own position. Decoding feeds such a drafter what it feeds any other: the
    anchor's token, then masks.
    """

    name: ClassVar[str] = "masked"
    num_anchors: int
    label_layout: LabelLayout = "same_position"

    def __init__(
        self,
        *,
        block_size: int = 16,  # slots of a block
        num_anchors: int = 512,  # most blocks per document and epoch; of more, some are drawn
        min_rate: float | int = 0.1,  # least chance of a slot to be masked; the greatest is 1
        mask_token_id: int | None = None,  # embedding row fed to masked slots; null chooses an unused one
    ) -> None:
        if num_anchors < 1:
            raise SettingError(
                "block.num_anchors",
                f"{num_anchors} would train on nothing",
                do="It is the most blocks used per document and epoch: use 1 or more",
            )
        if not 0 < min_rate <= 1:
            raise SettingError("block.min_rate", f"{min_rate} is not a chance", "Use a number above 0, at most 1")
        self.block_size = block_size
        self.num_anchors = num_anchors
        self.min_rate = float(min_rate)
        self.mask_token_id = mask_token_id

    def eligible_anchors(self, loss_mask: Bool[Tensor, " S"]) -> Int[Tensor, " n"]:
        """Every ``block_size``-th position of each run of supervised tokens, from its first one on."""
        return tiles(loss_mask, self.block_size).nonzero().squeeze(1)

    def num_predicting(self, alignment: Alignment) -> int:
        return alignment.block_size

    def blocks(
        self,
        document: Document,
        alignment: Alignment,
        *,
        seed: int,
        epoch: int,
        vocabulary: Bool[Tensor, " V"] | None = None,
    ) -> BlockLayout:
        eligible = self.eligible_anchors(document.loss_mask)
        key = (seed, epoch, document.sample_id)
        starts = draw_sorted(eligible, self.num_anchors, key=key)
        shape = (len(eligible), 1 + alignment.block_size)
        bits = draw_uniform(shape[0] * shape[1], key=(*key, _MASKS)).view(shape)[torch.searchsorted(eligible, starts)]
        rates = self.min_rate + (1.0 - self.min_rate) * bits[:, :1]
        layout = mask_blocks(document, starts, bits[:, 1:] < rates, alignment, vocabulary)
        layout.streams["mask_rate"] = rates[None].float()
        check_layout(layout, document.input_ids[None], alignment)
        return layout


def draw_uniform(count: int, *, key: tuple[int, ...]) -> Float[Tensor, " n"]:
    """``count`` float64 numbers from [0, 1), a function of ``key`` alone (Philox's bits, as in ``draw_sorted``)."""
    bits = np.random.Philox(np.random.SeedSequence(key)).random_raw(count)
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def mask_blocks(
    document: Document,
    starts: Int[Tensor, " N"],
    masked: Bool[Tensor, "N K"],
    alignment: Alignment,
    vocabulary: Bool[Tensor, " V"] | None = None,
) -> BlockLayout:
    """Blocks at ``starts`` whose slots ``masked`` are fed the mask token and learn the token of their own place.

    Slots that stand beyond the run of supervised tokens which their block starts in are masked whatever ``masked``
    says, and not scored. Neither is the first token of a document, which no target row teaches.
    """
    ids, mask = document.input_ids, document.loss_mask
    positions = starts[:, None] + torch.arange(alignment.block_size)  # [N, K]
    places = positions.clamp(max=max(0, len(ids) - 1))
    inside = ((positions < len(ids)) & mask[places]).cumprod(1).bool()
    predicts = masked | ~inside
    scored = predicts & inside & (positions > 0)
    labels = ids[places]
    valid = scored if vocabulary is None else scored & vocabulary[labels]
    return BlockLayout(
        anchors=starts[None],
        keep=torch.ones_like(starts, dtype=torch.bool)[None],
        context_start=torch.zeros_like(starts)[None],
        context_end=starts.clone()[None],
        input_ids=torch.where(predicts, alignment.mask_token_id, labels)[None],
        position_ids=positions[None],
        predicts=predicts[None],
        label_index=places[None],
        labels=labels[None],
        prev_ids=ids[(places - 1).clamp(min=0)][None],
        scored=scored[None],
        valid=valid.clone()[None],
        rows=scored.flatten().nonzero().squeeze(1),
    )
