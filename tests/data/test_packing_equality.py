"""A packed row trains on exactly what its documents train on alone: anchors, features and losses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_lightning.block import Anchored
from dflash_lightning.data import DraftData
from dflash_lightning.loss import CrossEntropy
from dflash_lightning.model import DraftModel
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import StepContext, TrainBatch

BLOCK = Anchored(block_size=4, num_anchors=5)
FAMILIES = ("llama", "qwen3", "gemma3", "gpt_oss")  # full and sliding attention, softmax with sinks


@pytest.fixture(params=FAMILIES)
def parts(
    request: pytest.FixtureRequest, make_target: Callable[..., FrozenTarget], make_draft: Callable[..., DraftModel]
) -> tuple[FrozenTarget, DraftModel]:
    target = make_target(request.param)
    return target, make_draft(target)


def batches(target: FrozenTarget, draft: DraftModel, path: Path, *, packing: bool) -> list[TrainBatch]:
    """One epoch; packed into rows of 96 tokens, or one document a row."""
    data = DraftData(
        target,
        train=str(path),
        max_length=48,
        row_tokens=96,
        packing=packing,
        rows_per_batch=2 if packing else 1,
        token_bucket=8,
        block_bucket=4,
    )
    data.setup()
    data.bind(BLOCK, draft.alignment, draft.required())
    return [data.on_after_batch_transfer(batch, 0) for batch in data.train_dataloader()]


def losses(target: FrozenTarget, draft: DraftModel, batch: TrainBatch) -> dict[int, float]:
    """Sum of the weighted cross entropies of each document, found by asking for one document's slots at a time."""
    assert batch.features is not None
    layout, term, found = batch.layout, CrossEntropy(decay=4.0), {}
    hidden = draft.block_hidden(target.embed(layout.input_ids), layout, batch.features, batch.position_ids, target.lm)
    lm = draft.head_of(target.lm)
    for row, samples in enumerate(batch.sample_ids.tolist()):
        for number, sample in enumerate(samples):
            if sample < 0:
                continue
            start = int((batch.doc_ids[row] == number).nonzero()[0])
            mine = torch.zeros_like(layout.keep)
            mine[row] = layout.keep[row] & (layout.context_start[row] == start)
            kept = layout.valid
            layout.valid = kept & mine[..., None]
            out = draft.outputs(hidden, layout, lm)
            found[sample] = float(term.numerator(out, layout, None, StepContext(0, 1, 0)))
            layout.valid = kept
    return found


def documents(batch: TrainBatch) -> dict[int, tuple[Tensor, Tensor]]:
    """Per document its features and the positions of its anchors, counted from its own first token."""
    assert batch.features is not None
    found = {}
    for row, samples in enumerate(batch.sample_ids.tolist()):
        for number, sample in enumerate(samples):
            here = batch.doc_ids[row] == number
            if sample >= 0:
                start, end = int(here.nonzero()[0]), int(here.nonzero()[-1]) + 1
                layout = batch.layout
                mine = layout.keep[row] & (layout.context_start[row] == start)
                assert (layout.anchors[row, mine] < end).all() and (layout.context_end[row, mine] <= end).all()
                labels = layout.label_index[row, mine][layout.scored[row, mine]]
                assert ((labels >= start) & (labels < end)).all()
                found[sample] = (batch.features.hidden[row, here], layout.anchors[row, mine] - start)
    return found


@torch.no_grad()
def test_packed_rows_have_the_features_anchors_and_losses_of_their_documents_alone(
    parts: tuple[FrozenTarget, DraftModel], tmp_path: Path
) -> None:
    target, draft = parts
    rng, path = np.random.default_rng(0), tmp_path / "rows.jsonl"
    rows = []
    for length in (9, 48, 17, 30, 7, 12, 41, 23):  # some with a prompt between answers, some all answer
        mask = [int(j > 2 and j % 11 != 4) for j in range(length)]
        rows.append({"input_ids": rng.integers(0, 256, length).tolist(), "loss_mask": mask})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    packed, alone = (batches(target, draft, path, packing=packing) for packing in (True, False))
    assert len(packed) < len(alone) == len(rows) and all(batch.packed for batch in packed)

    apart = {sample: entry for batch in alone for sample, entry in documents(batch).items()}
    together = {sample: entry for batch in packed for sample, entry in documents(batch).items()}
    assert together.keys() == apart.keys() == set(range(len(rows)))
    for sample, (features, anchors) in apart.items():
        assert torch.equal(together[sample][1], anchors) and len(anchors)
        torch.testing.assert_close(together[sample][0], features, atol=2e-4, rtol=1e-4)
    expected = {sample: value for batch in alone for sample, value in losses(target, draft, batch).items()}
    found = {sample: value for batch in packed for sample, value in losses(target, draft, batch).items()}
    assert found == pytest.approx(expected, rel=2e-4) and min(expected.values()) > 0.1
