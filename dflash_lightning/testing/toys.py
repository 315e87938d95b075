"""The small model, document and head that everything is tried on."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.block import Anchored, count_slots
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.decoding.types import Scores
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import MarginalHead
from dflash_lightning.loss import CrossEntropy
from dflash_lightning.module import DraftModule, OptimSettings
from dflash_lightning.ops.lm_head import HeadOutput, LanguageHead
from dflash_lightning.target import FrozenTarget, load_target
from dflash_lightning.target.tiny import save_tiny_target
from dflash_lightning.types import BlockLayout, Document, TrainBatch

PROMPT, LENGTH, LETTERS = 6, 24, 16  # of the document that everything is tried on
SLOTS = 3  # drafts per block in checks without a model


@lru_cache(maxsize=1)
def toy_target() -> FrozenTarget:
    """A frozen random model of twelve layers and 32 tokens; nobody may change it."""
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_target(Path(folder), num_layers=12)
        return load_target(folder, dtype="float32")


def toy_module(**parts: Any) -> DraftModule:
    """A drafter for the toy target with the given parts (see ``DraftModule``) and DFlash's for the rest.

    All weights are moved a little, so that none that starts at 0 or 1 is forgotten unseen.
    """
    usual = {
        "block": Anchored(block_size=4, num_anchors=LENGTH),
        "conditioning": KVInjection(target_layer_ids=[1, 3]),
        "drafter": BlockTransformer(num_layers=2, init_std=0.2),
        "head": MarginalHead(),
        "loss": {"cross_entropy": CrossEntropy()},
        "optim": OptimSettings(lr=1e-3),
    }
    module = DraftModule(toy_target(), **{**usual, **parts})
    module.prepare(None)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for parameter in module.draft_model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def toy_document() -> Document:
    """24 tokens of which the first 6 are a prompt."""
    ids = torch.randint(0, LETTERS, (LENGTH,), generator=torch.Generator().manual_seed(0))
    return Document(0, ids, torch.arange(LENGTH) >= PROMPT)


def toy_batch(module: DraftModule) -> TrainBatch:
    """The toy document as a micro-batch, with all its blocks."""
    document = toy_document()
    layout = module.block.blocks(document, module.draft_model.alignment, seed=0, epoch=0)
    none = torch.zeros(1, LENGTH, dtype=torch.long)
    return TrainBatch(
        input_ids=document.input_ids[None],
        loss_mask=document.loss_mask[None],
        doc_ids=none,
        position_ids=torch.arange(LENGTH)[None],
        sample_ids=none[:, :1],
        layout=layout,
        window_totals=count_slots(layout),
        window=0,
        packed=False,
    )


class SpeakingHead(MarginalHead):
    """DFlash's head, with a signal and a distribution for every name that a loss term wants to read."""

    name = "marginal_with_signals"

    def __init__(
        self, *, signals: Sequence[str] = (), by_block: bool = False, distributions: Sequence[str] = ("main",)
    ) -> None:
        super().__init__()
        self.signals = tuple(signals)
        self.by_block = by_block
        self.distributions = tuple(distributions)

    def outputs(self, hidden: Float[Tensor, "B N K H"], layout: BlockLayout, lm: LanguageHead) -> HeadOutput:
        views = super().outputs(hidden, layout, lm).views
        return HeadOutput(dict.fromkeys(self.distributions, views["main"]), self._speak(hidden))

    def open(self, hidden: Float[Tensor, "B D H"], roots: Int[Tensor, " B"], lm: LanguageHead) -> Scores:
        return replace(super().open(hidden, roots, lm), signals=self._speak(hidden))

    def _speak(self, hidden: Float[Tensor, "*blocks D H"]) -> dict[str, Tensor]:
        said = hidden[..., 0, :] if self.by_block else hidden  # of the first slot, whose states no check changes
        return dict.fromkeys(self.signals, said.mean(-1).sigmoid())
