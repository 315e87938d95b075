"""Drafters that accept something, and their exports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_lightning.block import Anchored
from dflash_lightning.export import FORMATS, export
from dflash_lightning.model import DraftModel
from dflash_lightning.ops.lm_head import LabelLogProb
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import Document

PROMPTS = [[(37 * i + 11 * n) % 250 for i in range(20)] for n in (1, 2)]


def fit(target: FrozenTarget, draft: DraftModel, *, steps: int) -> DraftModel:
    """Teach ``draft`` the target's own greedy answers to ``PROMPTS``: rounds then accept some drafts and reject others.

    The last third of each answer is not taught.
    """
    lm, batches = draft.head_of(target.lm), []
    for number, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        text = target.model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=16, eos_token_id=None, pad_token_id=0
        )[0]
        document = Document(number, text, torch.arange(len(text)) >= len(prompt))
        layout = Anchored(block_size=draft.config.block_size, num_anchors=99).blocks(
            document, draft.alignment, seed=0, epoch=0, vocabulary=None
        )
        positions = torch.arange(len(text))[None]
        batches.append((layout, target.features(text[None], positions, draft.required()), positions))
    draft.train()
    optimizer = torch.optim.Adam(draft.parameters(), lr=5e-3)
    for _ in range(steps):
        for layout, features, positions in batches:
            hidden = draft.block_hidden(target.embed(layout.input_ids), layout, features, positions, lm)
            (log_prob,) = draft.outputs(hidden, layout, lm).views["main"].ask(LabelLogProb(layout.labels))
            loss = -torch.where(layout.valid, log_prob, 0.0).sum() / layout.valid.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return draft.eval()


@pytest.fixture(scope="session")
def fitted(
    make_target: Callable[..., FrozenTarget], make_draft: Callable[..., DraftModel]
) -> tuple[FrozenTarget, DraftModel]:
    """A tiny Qwen3 and a drafter of two layers fitted to it; read, never changed."""
    target = make_target("qwen3")
    return target, fit(target, make_draft(target, init_std=0.05, target_layer_ids=[1, 2]), steps=25)


@pytest.fixture(scope="session")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``write(target, draft, format, **settings)``: the folder of an export, in float32 unless said otherwise."""

    def make(target: FrozenTarget, draft: DraftModel, format: str, **settings: Any) -> Path:
        folder = tmp_path_factory.mktemp("export") / format
        settings = {"dtype": "float32", "prompts": PROMPTS, "max_new_tokens": 24, **settings}
        export(draft, target, folder, format=format, **settings)
        return folder

    return make


@pytest.fixture(scope="session")
def exports(fitted: tuple[FrozenTarget, DraftModel], write: Callable[..., Path]) -> dict[str, Path]:
    """``fitted`` in every format, in float32: read, never changed."""
    return {name: write(*fitted, name) for name in FORMATS}
