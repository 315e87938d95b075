"""Values that pass between the parts of the framework.

Dimension legend, used in every shape annotation of the package:

``B`` batch rows, ``S`` positions of a (packed) row, ``N`` blocks of a row, ``K`` slots of a block (the anchor is slot
0), ``Kp`` those of them that predict, ``H`` hidden size, ``T`` tapped target layers, ``L`` draft layers, ``V``
vocabulary rows, ``D`` head dimension, ``Hq``/``Hkv`` query/key-value heads, ``R`` rows handed over in one piece, ``M``
documents of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

LabelLayout = Literal["same_position", "anchor_first"]
LABEL_LAYOUTS: tuple[LabelLayout, ...] = ("same_position", "anchor_first")


@dataclass(frozen=True)
class Alignment:
    """How slots, positions and labels of a block line up; made from ``DraftConfig``, read by training and decoding.

    A block starts at an *anchor*: the last token known as a token whose target features do not exist yet. Slot ``i``
    stands at position ``anchor + i`` and is fed the anchor token (slot 0) or the mask token. Slot ``i`` predicts the
    token at ``anchor + i`` (``same_position``, DFlash; slot 0 predicts nothing) or at ``anchor + i + 1``
    (``anchor_first``, DSpark sec. 3.1).
    """

    block_size: int
    mask_token_id: int
    label_layout: LabelLayout = "same_position"

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ValueError(
                f"block.block_size: {self.block_size} leaves no slot to draft. It counts the anchor slot, so use 2 "
                "or more (DFlash uses 16)."
            )
        if self.label_layout not in LABEL_LAYOUTS:
            raise ValueError(f"block.label_layout: {self.label_layout!r} is unknown. Use one of {list(LABEL_LAYOUTS)}.")

    @property
    def shift(self) -> int:
        """Offset from a slot's own position to the position it predicts."""
        return 0 if self.label_layout == "same_position" else 1

    @property
    def first_slot(self) -> int:
        """First slot that predicts something."""
        return 1 - self.shift

    @property
    def num_drafts(self) -> int:
        """Tokens proposed per round."""
        return self.block_size - self.first_slot


@dataclass(frozen=True)
class FeatureSpec:
    """What a component wants to know of a target forward; specs are united with ``|``.

    ``layer_ids`` are 0-based decoder layers: id ``i`` is the *output* of decoder layer ``i`` (Hugging Face's
    ``hidden_states[i + 1]``, and never the normed last entry). ``last_hidden`` is the hidden state after the final
    norm.
    """

    layer_ids: tuple[int, ...] = ()
    last_hidden: bool = False

    def __or__(self, other: FeatureSpec) -> FeatureSpec:
        ids = tuple(sorted({*self.layer_ids, *other.layer_ids}))
        return FeatureSpec(ids, self.last_hidden or other.last_hidden)


@dataclass
class TargetFeatures:
    """Hidden states of the frozen target, one entry of dimension ``T`` per id in ``layer_ids``, in that order."""

    layer_ids: tuple[int, ...]
    hidden: Float[Tensor, "B S T H"]
    last_hidden: Float[Tensor, "B S H"] | None = None

    def select(self, layer_ids: tuple[int, ...]) -> Float[Tensor, "B S t H"]:
        """Hidden states of ``layer_ids`` in the order asked for; no copy when that is what is stored."""
        if layer_ids == self.layer_ids:
            return self.hidden
        missing = [i for i in layer_ids if i not in self.layer_ids]
        if missing:
            raise ValueError(f"features hold target layers {list(self.layer_ids)}, but layers {missing} were asked for")
        return self.hidden[:, :, [self.layer_ids.index(i) for i in layer_ids]]


@dataclass
class BlockLayout:
    """Where the blocks of a batch start, what their slots hold and what is labelled: ids and masks, never features.

    ``anchors``, ``context_start``, ``context_end`` and ``label_index`` are *row indices* (0..S-1); ``position_ids``
    restart with every document. A block may read context rows ``context_start <= j < context_end`` only. ``scored``
    marks slots of real blocks whose label is supervised; ``valid`` those of them whose label the draft vocabulary can
    express: losses use ``valid``, metrics count a scored slot that is not valid as wrong. At every scored slot
    ``prev_ids`` is the token at ``label_index - 1``, which is also the target row that teaches it. Anchors are sorted
    within a row; padding blocks (``keep`` false) come last. ``rows`` lists the scored slots as flat indices into B*N*K,
    so that heads and losses gather them without a host sync.
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


@dataclass(frozen=True)
class Document:
    """One tokenised training row: ids, which of them are supervised, and its number in the data set."""

    sample_id: int
    input_ids: Int[Tensor, " S"]
    loss_mask: Bool[Tensor, " S"]


@dataclass(frozen=True)
class TargetFacts:
    """What drafter and data need to know of a target without holding its weights.

    ``vocab_size`` counts embedding rows; ``num_tokens`` counts the tokenizer's tokens (0 without a tokenizer).
    ``digest`` identifies the weights (hex; see ``FrozenTarget``). ``embedding_scale`` is what the family multiplies its
    embedding rows with inside the model (1.0 for most; ``sqrt(hidden_size)`` for Gemma); drafters read *raw* rows.
    """

    name: str
    revision: str | None
    digest: str
    model_type: str
    vocab_size: int
    num_tokens: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_positions: int
    embedding_scale: float
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None


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
        k = (len(vector) - 2) // 2
        return cls(vector[:k], vector[k : 2 * k], vector[2 * k], vector[2 * k + 1])


@dataclass
class TrainBatch:
    """One micro-batch as collate makes it. Rows hold whole documents; padding at the end of a row has ``doc_ids`` -1.

    ``position_ids`` restart at 0 with every document (and with the padding, which is a document of its own).
    ``window_totals`` are this rank's counts over the whole gradient-accumulation window that the micro-batch belongs
    to, and ``window`` numbers that window within the epoch: equal numbers mean equal totals. ``packed`` says whether
    any row holds more than one document, padding included (null: nobody looked), so that no device need be asked.
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


@dataclass
class Scores:
    """What a drafter thinks of the tokens after each root; made by a head, read by a builder.

    ``logits`` hold ``D`` laws per row: one column per token id, or per entry of ``ids`` (a reduced vocabulary, or
    candidates of each slot). Without ``step`` these are the laws. With ``step`` the law of a token depends on the
    tokens drafted before it, and ``logits`` are a first look only: ``step(state, tokens, depth)`` then gives the laws
    at ``depth`` (0 for the token right after the root) of ``W`` lanes per row whose last tokens are ``tokens``, with
    the state to go on from. The ``logits`` of what it returns are ``[B, W, c]``. It starts from ``state``, one lane
    per row, and the roots as ``tokens``; it never changes a state in place, so that a lane is copied by
    ``gather_lanes``.

    ``signals`` are what policies read, per slot ``[B, D]`` or per row ``[B]``; what ``step`` returns has those of its
    own depth, per lane ``[B, W]``. A signal that depends on drafted tokens is known to ``step`` only.
    """

    logits: Float[Tensor, "B D c"]
    ids: Int[Tensor, " c"] | Int[Tensor, "B D c"] | None = None
    signals: dict[str, Tensor] = field(default_factory=dict)
    state: Any = None
    step: Callable[[Any, Int[Tensor, "B W"], int], tuple[Scores, Any]] | None = None


def gather_lanes(state: Any, index: Int[Tensor, "B W"]) -> Any:
    """The lanes ``index`` of a state of ``Scores``: tensors ``[B, lanes, ...]``, or tuples, lists and dicts of them.

    A tensor with a single lane for all (``[B, 1, ...]``) may be asked for lane 0 as often as wanted. Null stays null.
    """
    if isinstance(state, Tensor):
        shape = (*index.shape, *(1 for _ in state.shape[2:]))
        return state.gather(1, index.view(shape).expand(*index.shape, *state.shape[2:]))
    if isinstance(state, dict):
        return {name: gather_lanes(value, index) for name, value in state.items()}
    if isinstance(state, tuple | list):
        return type(state)(gather_lanes(value, index) for value in state)
    assert state is None, f"a state of lanes is made of tensors, not of {type(state)}"
    return None


@dataclass(frozen=True)
class StepContext:
    """Where training stands, for schedules: ``step`` of ``total_steps`` counts optimizer steps."""

    step: int
    total_steps: int
    epoch: int
