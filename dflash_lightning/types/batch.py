"""A micro-batch: documents, the blocks on them, and the counts that losses are divided by."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dflash_lightning.types.carried import Carried
from dflash_lightning.types.features import TargetFeatures


@dataclass
class BlockLayout:
    """Where the blocks of a batch start, what their slots hold and what is labelled: ids and masks, never features.

    ``anchors``, ``context_start``, ``context_end`` and ``label_index`` are *row indices* (0..S-1); ``position_ids``
    restart with every document. A block may read context rows ``context_start <= j < context_end`` only. ``scored``
    marks slots of real blocks whose label is supervised; ``valid`` those of them whose label the draft vocabulary can
    express: losses use ``valid``, metrics count a scored slot that is not valid as wrong. At every scored slot
    ``prev_ids`` is the token at ``label_index - 1``, which is also the target row that teaches it. Anchors are sorted
    within a row; padding blocks (``keep`` false) come last. ``rows`` lists the scored slots as flat indices into B*N*K,
    so that heads and losses gather them without a host sync; ``predicting`` lists in the same way all that predict,
    scored or not (null: nobody looked).
    """

    anchors: Int[Tensor, "B N"]
    keep: Bool[Tensor, "B N"]
    context_start: Int[Tensor, "B N"]
    context_end: Int[Tensor, "B N"]
    input_ids: Int[Tensor, "B N K"]
    position_ids: Int[Tensor, "B N K"]
    predicts: Bool[Tensor, "B N K"]
    label_index: Int[Tensor, "B N K"]
    labels: Int[Tensor, "B N K"]
    prev_ids: Int[Tensor, "B N K"]
    scored: Bool[Tensor, "B N K"]
    valid: Bool[Tensor, "B N K"]
    rows: Int[Tensor, " Rows"]
    streams: dict[str, Tensor] = field(default_factory=dict)
    predicting: Int[Tensor, " Predicting"] | None = None


@dataclass(frozen=True)
class Document:
    """One tokenised training row: ids, which of them are supervised, and its number in the data set."""

    sample_id: int
    input_ids: Int[Tensor, " S"]
    loss_mask: Bool[Tensor, " S"]


@dataclass
class SlotTotals:
    """Counts that loss denominators are made of: sums over blocks, so totals of parts add up to the total.

    ``valid[j]`` counts valid slots that are the ``j``-th *predicting* slot of their block, wherever in the block that
    is; ``prefix_valid[j]`` those of them whose predicting slots before them in the block are all valid too, so that
    ``prefix_valid[0]`` counts blocks whose first predicting slot is valid. ``blocks`` counts blocks with a valid slot,
    ``documents`` documents with such a block.
    """

    valid: Float[Tensor, " Kp"]
    prefix_valid: Float[Tensor, " Kp"]
    blocks: Float[Tensor, ""]
    documents: Float[Tensor, ""]

    @classmethod
    def zeros(cls, num_predicting: int) -> SlotTotals:
        """Of no block; ``num_predicting`` is the most predicting slots of a block (``Kp``)."""
        k = torch.zeros(num_predicting)
        return cls(k, k.clone(), torch.zeros(()), torch.zeros(()))

    def __add__(self, other: SlotTotals) -> SlotTotals:
        return SlotTotals.unpack(self.pack() + other.pack())

    def pack(self) -> Float[Tensor, " Q"]:
        """One flat vector (``2 Kp + 2`` numbers), so that one all-reduce carries it."""
        return torch.cat([self.valid, self.prefix_valid, self.blocks[None], self.documents[None]])

    @classmethod
    def unpack(cls, vector: Float[Tensor, " Q"]) -> SlotTotals:
        """The totals from the vector that ``pack`` made, after a sum over ranks."""
        k = (len(vector) - 2) // 2
        return cls(vector[:k], vector[k : 2 * k], vector[2 * k], vector[2 * k + 1])


@dataclass
class TrainBatch:
    """One micro-batch as collate makes it. Rows hold whole documents; padding at the end of a row has ``doc_ids`` -1.

    ``position_ids`` restart at 0 with every document (and with the padding, which is a document of its own).
    ``window_totals`` are this rank's counts over the whole gradient-accumulation window that the micro-batch belongs
    to, and ``window`` numbers that window within the epoch: equal numbers mean equal totals. ``packed`` says whether
    any row holds more than one document, padding included (null: nobody looked), so that no device need be asked.
    ``carried`` is what the blocks read of a round before, where one was played (``training.rounds``).
    """

    input_ids: Int[Tensor, "B S"]
    loss_mask: Bool[Tensor, "B S"]
    doc_ids: Int[Tensor, "B S"]
    position_ids: Int[Tensor, "B S"]
    sample_ids: Int[Tensor, "B M"]
    layout: BlockLayout
    window_totals: SlotTotals
    window: int
    features: TargetFeatures | None = None
    packed: bool | None = None
    carried: Carried | None = None


@dataclass(frozen=True)
class StepContext:
    """Where training stands, for schedules: ``step`` of ``total_steps`` counts optimizer steps."""

    step: int
    total_steps: int
    epoch: int
