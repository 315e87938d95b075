"""A random target, its drafter and a batch of a given shape: what is measured in place of a user's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from dflash_lightning.block import Anchored, count_slots, merge_layouts
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import MarginalHead
from dflash_lightning.loss import CrossEntropy
from dflash_lightning.module import DraftModule, OptimSettings
from dflash_lightning.profiling.shape import Shape
from dflash_lightning.target import FrozenTarget
from dflash_lightning.target.tiny import random_target
from dflash_lightning.types import Document, TrainBatch


@dataclass(frozen=True)
class Place:
    """Where and in what is computed: the device, the target's dtype, and that of the drafter's products."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    @property
    def clock(self) -> int:
        """Which reading of ``ops.clock.now`` counts: CPU-seconds on a CPU, where others may compute too."""
        return 1 if self.device == "cpu" else 0


def build_target(shape: Shape, place: Place, *, positions: int = 0) -> FrozenTarget:
    """A Llama of this shape with random weights, for rows of up to ``positions`` tokens (0: ``sequence``)."""
    return random_target(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.target_layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max(positions, shape.sequence, 64),
        dtype=place.dtype,
    ).to(place.device)


def build_module(shape: Shape, target: FrozenTarget) -> DraftModule:
    """DFlash's drafter for ``target``, ready to train, with the loss of its paper."""
    module = DraftModule(
        target,
        block=Anchored(block_size=shape.block, num_anchors=shape.anchors, mask_token_id=_mask(shape)),
        conditioning=KVInjection(target_layer_ids=shape.layer_ids),
        drafter=BlockTransformer(num_layers=shape.layers),
        head=MarginalHead(),
        loss={"cross_entropy": CrossEntropy(decay=7.0)},
        optim=OptimSettings(lr=6e-4),
        draft_vocabulary="data" if shape.draft_vocab else None,
    )
    if shape.draft_vocab:
        module.model = module.plan.make(target, set(range(shape.draft_vocab)))
    module.prepare(None)
    module.to(target.device)
    return module


def build_batch(shape: Shape, module: DraftModule, *, seed: int = 0) -> TrainBatch:
    """``batch`` rows of random tokens, each a document of its own, with ``anchors`` blocks."""
    ids = _tokens(shape, seed)
    everywhere = torch.ones(shape.sequence, dtype=torch.bool)
    alignment, vocabulary = module.draft_model.alignment, module._vocabulary_mask()
    layouts = [
        module.block.blocks(Document(row, ids[row], everywhere), alignment, seed=seed, epoch=0, vocabulary=vocabulary)
        for row in range(shape.batch)
    ]
    layout = merge_layouts([[(0, one)] for one in layouts], num_blocks=shape.anchors, alignment=alignment)
    return TrainBatch(
        input_ids=ids,
        loss_mask=everywhere.expand_as(ids).clone(),
        doc_ids=torch.zeros_like(ids),
        position_ids=torch.arange(shape.sequence).expand_as(ids).clone(),
        sample_ids=torch.arange(shape.batch)[:, None],
        layout=layout,
        window_totals=sum((count_slots(one) for one in layouts[1:]), count_slots(layouts[0])),
        window=0,
        packed=False,
    )


def build_prompts(shape: Shape, *, seed: int = 0) -> list[list[int]]:
    """``batch`` prompts of ``sequence`` random tokens."""
    return _tokens(shape, seed).tolist()


def _tokens(shape: Shape, seed: int) -> Int[Tensor, "B S"]:
    """Ids that the drafter can propose, if it cannot propose all."""
    known = shape.draft_vocab or _mask(shape)
    return torch.randint(0, known, (shape.batch, shape.sequence), generator=torch.Generator().manual_seed(seed))


def _mask(shape: Shape) -> int:
    return shape.vocab - 1
