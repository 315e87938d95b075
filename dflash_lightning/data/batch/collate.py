"""From the documents of an accumulation window to its micro-batches: padding, positions, block layouts, totals."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool
from torch import Tensor

from dflash_lightning.block import BlockConstructor, count_slots, merge_layouts
from dflash_lightning.data.batch.packing import MicroBatch
from dflash_lightning.data.read.documents import DocumentStore
from dflash_lightning.target.masks import is_packed
from dflash_lightning.types import Alignment, BlockLayout, SlotTotals, TrainBatch


@dataclass(frozen=True)
class WindowItem:
    """One accumulation window of one rank, as the sampler hands it to a worker.

    ``first`` micro-batches were trained on before a resume and are not made again; they still count in the totals.
    """

    epoch: int
    window: int
    first: int
    micro_batches: tuple[MicroBatch, ...]


@dataclass(frozen=True)
class BatchMaker:
    """Makes micro-batches on the CPU, in workers. Holds ids and settings only, so it is cheap to fork and to pickle.

    A window is made as a whole: its totals need the layouts of all its micro-batches, which are then computed once.
    Positions are padded to a multiple of ``token_bucket`` and blocks to one of ``block_bucket``, so that few distinct
    shapes reach the device. Every micro-batch has ``rows_per_batch`` rows; missing ones hold padding only.
    """

    store: DocumentStore
    block: BlockConstructor
    alignment: Alignment
    vocabulary: Bool[Tensor, " V"] | None
    seed: int
    rows_per_batch: int
    token_bucket: int
    block_bucket: int
    max_length: int
    pad_token_id: int

    def window(self, item: WindowItem) -> list[TrainBatch]:
        """Micro-batches ``item.first ..`` of the window, each with the totals of the whole window."""
        alignment = self._alignment()
        documents = [d for micro_batch in item.micro_batches for pack in micro_batch for d in pack]
        layouts = {
            d: self.block.blocks(self.store[d], alignment, seed=self.seed, epoch=item.epoch, vocabulary=self.vocabulary)
            for d in documents
        }
        num_predicting = self.block.num_predicting(alignment)
        totals = SlotTotals.zeros(num_predicting)
        for layout in layouts.values():
            totals = totals + count_slots(layout, num_predicting)
        return [self._batch(batch, layouts, totals, item.window) for batch in item.micro_batches[item.first :]]

    def _alignment(self) -> Alignment:
        """With the slots that blocks have now: some grow between epochs."""
        return replace(self.alignment, block_size=self.block.block_size)

    def _batch(
        self, micro_batch: MicroBatch, layouts: dict[int, BlockLayout], totals: SlotTotals, window: int
    ) -> TrainBatch:
        packs = [*micro_batch, *[()] * (self.rows_per_batch - len(micro_batch))]
        length = max(sum(int(self.store.lengths[d]) for d in pack) for pack in packs)
        shape = (len(packs), _round_up(length, self.token_bucket))
        input_ids = torch.full(shape, self.pad_token_id)
        loss_mask = torch.zeros(shape, dtype=torch.bool)
        doc_ids = torch.full(shape, -1)
        position_ids = torch.zeros(shape, dtype=torch.long)
        sample_ids = torch.full((len(packs), max(1, max(len(pack) for pack in packs))), -1)
        placed: list[list[tuple[int, BlockLayout]]] = []
        for row, pack in enumerate(packs):
            offset = 0
            placed.append([])
            for number, d in enumerate(pack):
                document = self.store[d]
                span = slice(offset, offset + len(document.input_ids))
                input_ids[row, span] = document.input_ids
                loss_mask[row, span] = document.loss_mask
                doc_ids[row, span] = number
                position_ids[row, span] = torch.arange(len(document.input_ids))
                sample_ids[row, number] = d
                placed[row].append((offset, layouts[d]))
                offset = span.stop
            # Padding is a document of its own; it restarts so that it never asks for positions the model lacks.
            position_ids[row, offset:] = torch.arange(shape[1] - offset) % self.max_length
        most = max(sum(layouts[d].anchors.shape[1] for d in pack) for pack in packs)
        layout = merge_layouts(placed, num_blocks=_round_up(most, self.block_bucket), alignment=self._alignment())
        packed = is_packed(position_ids)
        return TrainBatch(
            input_ids, loss_mask, doc_ids, position_ids, sample_ids, layout, totals, window, packed=packed
        )


def _round_up(value: int, multiple: int) -> int:
    return max(1, -(-value // multiple)) * multiple
