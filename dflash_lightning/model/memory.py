"""What a training step holds in memory, by a formula: said before the first step, and where memory runs out.

Counted are the numbers that the backward pass needs of a drafter of attention and feed-forward layers; what the head or
a conditioning keeps of its own comes on top. ``tests/measure_memory.py`` holds it against what is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dflash_lightning.geometry import LayerGeometry
from dflash_lightning.model import DraftModel
from dflash_lightning.ops.fused import can_fuse
from dflash_lightning.ops.head_products import chunk_rows, packed_copies
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import FeatureSpec

# What the allocator holds beyond what is asked for, between blocks that are still in use. With it the formula is within
# an eighth of what was measured, on either side.
_SPLIT = 1.03
_WIDE = 4  # bytes of float32: parameters, gradients, optimizer, norms
# Logits of a chunk, their probabilities and the gradient; one, where the gradient takes the logits' memory.
_CHUNKS = 3
# Freed blocks that are smaller stay with the process (glibc, at most), in pieces that no gradient fits.
_GIVEN_BACK = 32 * 2**20
# What makes a part smaller, as settings of a recipe.
ADVICE = {
    "target": "a smaller target, or target.dtype=bfloat16",
    "drafter": "fewer layers (drafter.num_layers), or drafter.intermediate_size",
    "gradients and optimizer": "fewer layers (drafter.num_layers), or drafter.intermediate_size",
    "activations": "fewer blocks per document (block.num_anchors), fewer slots (block.block_size), or fewer tokens per "
    "micro-batch (data.row_tokens, data.rows_per_batch, with trainer.accumulate_grad_batches to match), or "
    "callbacks=[.., activation_checkpointing], which makes them a second time",
    "features": "fewer tokens per micro-batch (data.row_tokens, data.rows_per_batch, with "
    "trainer.accumulate_grad_batches to match), or conditioning.num_features",
    "next batch": "data.prefetch_features=false, which makes the features of a batch when it is its turn",
    "logits": "draft_vocabulary=data, which leaves out tokens that the training rows do not have",
}


@dataclass(frozen=True)
class StepMemory:
    """Bytes by part, weights included. ``before`` names parts that are there before the first step.

    ``shared`` of them are held by two parts in turn: logits that are given back before the gradients are made.
    """

    parts: Mapping[str, int]
    shared: int = 0
    before: frozenset[str] = field(default=frozenset({"target", "drafter"}))

    @property
    def total(self) -> int:
        """All parts, and what is lost between them."""
        return self.growth + sum(count for name, count in self.parts.items() if name in self.before)

    @property
    def growth(self) -> int:
        """What steps take beyond what is there before the first."""
        taken = sum(count for name, count in self.parts.items() if name not in self.before)
        return round(_SPLIT * (taken - self.shared))

    @property
    def largest(self) -> str:
        """The part that takes most."""
        return max(self.parts, key=lambda name: self.parts[name])

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        return {"predicted_bytes": self.growth, "parts": dict(self.parts)}

    def line(self) -> str:
        """One line of text."""
        listed = ", ".join(f"{name} {size_text(count)}" for name, count in self.parts.items())
        return f"memory: about {size_text(self.total)} at the most ({listed})"

    def advice(self) -> str:
        """What takes most, and which setting makes it smaller."""
        name = self.largest
        return (
            f"Of about {size_text(self.total)} that a step needs, {name} take{'s' * (not name.endswith('s'))} most: "
            f"{size_text(self.parts[name])}. Use {ADVICE[name]}"
        )


def step_memory(
    target: FrozenTarget,
    draft: DraftModel,
    spec: FeatureSpec,
    *,
    tokens: int,
    blocks: int,
    autocast: torch.dtype | None = None,
    checkpointed: bool = False,
    ahead: bool = False,
) -> StepMemory:
    """Of a micro-batch with ``tokens`` positions and ``blocks`` blocks, over all its rows.

    ``autocast`` is what products are computed in where that is not float32. On a CPU less is kept of what is float32
    (``ops.fused``). ``checkpointed`` layers keep their inputs, and the rest of one layer at a time. ``ahead``
    says that the target reads the next micro-batch during the step: the memory of that pass is not free for the step's
    activations then, and besides its features those of the batch before may not be given back yet (``data.ahead``).
    """
    fused = can_fuse(next(draft.parameters()))
    config, weights = draft.config, sum(p.numel() for p in draft.parameters())
    trained = sum(p.numel() for p in draft.parameters() if p.requires_grad)
    slots, narrow = blocks * config.block_size, _WIDE if autocast is None else autocast.itemsize
    width = (len(spec.layer_ids) + spec.last_hidden) * target.facts.hidden_size
    keys = 2 * len(spec.kv_ids) * target.facts.num_kv_heads * target.facts.head_dim
    layers, geometry = config.num_hidden_layers, config.geometry
    kept = slots * _slot_bytes(geometry, narrow, fused) + tokens * _context_bytes(geometry, narrow, fused)
    kept = kept + layers * slots * config.hidden_size * _WIDE if checkpointed else layers * kept
    # The last norm's, and the angles. The first layer's input is not kept, since it needs no gradient; where norms are
    # fused it is, and the last norm keeps one number less per feature.
    kept += slots * (config.hidden_size + 2 * config.head_dim) * _WIDE
    kept += tokens * config.hidden_size * (2 * narrow if fused else narrow + 2 * _WIDE)  # the joined features' norm
    kept += 0 if autocast is None else (weights + tokens * width) * narrow  # copies of weights and features
    features = tokens * (width + keys) * target.dtype.itemsize
    gradients, rows = _WIDE * trained, blocks * config.alignment.num_drafts
    chunk, head = _logit_bytes(draft, target, spec, rows, autocast)
    parts = {
        "target": sum(p.numel() * p.element_size() for p in target.model.parameters()),
        "drafter": _WIDE * weights,
        "gradients and optimizer": 3 * gradients,  # AdamW has two moments
        "activations": kept,
        "features": features,
        **({"next batch": 2 * features + _pass_bytes(target, tokens)} if ahead else {}),
        "logits": chunk + head,
    }
    return StepMemory(parts, min(gradients, chunk) if chunk > _GIVEN_BACK else 0)


def _pass_bytes(target: FrozenTarget, tokens: int) -> int:
    """What the target's pass holds at the most besides its results: one layer, without gradients.

    In the MLP that is the layer's input, what comes out of attention and its norm, and three of the inner numbers: one
    factor, the other, their product. Experts, of which a token runs few, hold less. Attention with wide heads holds
    more: queries with their halves turned, and what comes out.
    """
    facts = target.facts
    queries, keys = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    mlp, attention = 3 * facts.hidden_size + 3 * facts.intermediate_size, 2 * facts.hidden_size + 4 * queries + 2 * keys
    return tokens * max(mlp, attention) * target.dtype.itemsize


def _slot_bytes(geometry: LayerGeometry, narrow: int, fused: bool) -> int:
    """What one layer keeps of a slot: two inputs and two norms; queries, keys, values and their norms; the MLP.

    A norm keeps its input and what it has divided, in float32. Its result is kept as the input of a linear layer; in
    narrow products that is a copy in their dtype, one for each of the five layers that read it. ``fused`` norms keep
    one number instead of what they have divided, and write in the products' dtype; a fused MLP keeps what comes out of
    its first two layers.
    """
    hidden, queries, keys, inner = geometry.hidden_size, *_widths(geometry)
    sums = 2 * geometry.num_attention_heads + geometry.num_key_value_heads + 2
    if fused:
        mlp = (2 if geometry.hidden_act == "silu" else 4) * inner
        return 2 * hidden * (_WIDE + narrow) + (3 * (queries + keys) + mlp) * narrow + sums * _WIDE
    norms = 6 * hidden * _WIDE if narrow == _WIDE else hidden * (4 * _WIDE + 5 * narrow)
    heads = (queries + keys) * 2 * (_WIDE + narrow)  # before and in their norm; rotated keys, values, queries, output
    return norms + heads + 4 * inner * narrow + sums * _WIDE


def _context_bytes(geometry: LayerGeometry, narrow: int, fused: bool) -> int:
    """What one layer keeps of a context row: key before and in its norm, and rotated; value; angles."""
    _, keys, _ = _widths(geometry)
    rows = 3 * keys * narrow if fused else 2 * keys * (_WIDE + narrow)
    return rows + (2 * geometry.head_dim + geometry.num_key_value_heads) * _WIDE


def _widths(geometry: LayerGeometry) -> tuple[int, int, int]:
    """Numbers of a slot's queries, of its keys, and inside the MLP."""
    queries, keys = geometry.num_attention_heads * geometry.head_dim, geometry.num_key_value_heads * geometry.head_dim
    return queries, keys, geometry.intermediate_size


def _logit_bytes(
    draft: DraftModel, target: FrozenTarget, spec: FeatureSpec, rows: int, autocast: torch.dtype | None
) -> tuple[int, int]:
    """The chunks of logits that exist at a time; and copies of the head with the hidden rows and their gradients."""
    columns, width = draft.config.draft_vocab_size or target.facts.vocab_size, draft.config.hidden_size
    narrow = _WIDE if autocast is None else autocast.itemsize
    copies = packed_copies(draft.device, columns, width, narrow)
    over = can_fuse(next(draft.parameters())) and not spec.last_hidden  # all is read from logits as they are stored
    each = narrow if over else (_CHUNKS + 2 * spec.last_hidden) * _WIDE + (narrow if autocast is not None else 0)
    size, buffers = (narrow, 1) if over else (_WIDE, _CHUNKS)
    most = chunk_rows(draft.device, columns, itemsize=size, packed=copies > 0, buffers=buffers)
    head = (copies if autocast is None else max(1, copies)) * columns * width * narrow  # its cast, or laid out
    return min(rows, most) * columns * each, head + 2 * rows * width * _WIDE


def size_text(count: int) -> str:
    """Bytes in words."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{max(1, round(count / 2**20))} MiB"
