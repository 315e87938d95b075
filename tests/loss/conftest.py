"""Blocks whose draft and target laws are given as tables: the head is the identity on logarithms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dflash_lightning.ops.lm_head import HeadOutput, LanguageHead, Teacher, View
from dflash_lightning.types import BlockLayout


@dataclass
class Table:
    """One row of blocks; slot 0 predicts nothing. ``hidden`` are the draft's logits, ``[1, N, K, V]``."""

    layout: BlockLayout
    hidden: Tensor
    teacher: Teacher

    @property
    def out(self) -> HeadOutput:
        lm = self.teacher.lm
        return HeadOutput({"main": View.of(self.hidden, self.layout.rows, lm)})


def make_table(q: Tensor, p: Tensor, labels: Tensor, valid: Tensor | None = None) -> Table:
    """Blocks of laws ``q`` and ``p`` [N, Kp, V] with ``labels`` [N, Kp]; ``valid`` null: all."""
    num_blocks, drafts, size = q.shape
    shape = (1, num_blocks, drafts + 1)

    def with_anchor(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (1, 0))[None]

    ok = with_anchor(torch.ones_like(labels, dtype=torch.bool) if valid is None else valid)
    blocks = torch.zeros(shape[:2], dtype=torch.long)
    # The target row of slot (n, k) is n * K + k, so the label stands one further.
    index = torch.arange(num_blocks * shape[2]).view(shape) + 1
    slots = torch.zeros(shape, dtype=torch.long)
    layout = BlockLayout(
        anchors=blocks,
        keep=torch.ones(shape[:2], dtype=torch.bool),
        context_start=blocks,
        context_end=blocks,
        input_ids=slots,
        position_ids=slots,
        predicts=(torch.arange(shape[2]) > 0).expand(shape),
        label_index=index,
        labels=with_anchor(labels),
        prev_ids=slots,
        scored=ok,
        valid=ok,
        rows=ok.flatten().nonzero().squeeze(1),
    )

    def rows(law: Tensor) -> Tensor:
        return torch.cat([torch.full((num_blocks, 1, size), 1.0 / size, dtype=law.dtype), law], 1).log()

    hidden = rows(q)[None].clone().requires_grad_()
    teacher = Teacher(rows(p).flatten(0, 1)[None], layout, LanguageHead(torch.eye(size, dtype=q.dtype)))
    return Table(layout, hidden, teacher)


@pytest.fixture(scope="session")
def table() -> Callable[..., Table]:
    """``table(q, p, labels, valid=None)``: see ``make_table``."""
    return make_table
