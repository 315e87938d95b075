"""The target as a teacher: the dtype of its product, and how often it is made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_lightning.ops import teacher as teacher_file
from dflash_lightning.ops.lm_head import KL, LabelLogProb, LanguageHead, Overlap, Teacher, TeacherLogProb, View
from dflash_lightning.ops.teacher import argmax
from dflash_lightning.types import BlockLayout

SIZE, WIDTH = 40, 16
KEPT = torch.arange(0, SIZE, 3)


@dataclass
class Case:
    """A head in float32, blocks of one row whose first slot predicts nothing, and hidden states."""

    full: LanguageHead
    layout: BlockLayout
    last_hidden: Tensor
    hidden: Tensor


@pytest.fixture
def made() -> Case:
    torch.manual_seed(0)
    shape = (1, 3, 5)
    blocks, slots = torch.zeros(shape[:2], dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    scored = (torch.arange(shape[2]) > 0).expand(shape)
    layout = BlockLayout(
        anchors=blocks,
        keep=scored[..., 1],
        context_start=blocks,
        context_end=blocks,
        input_ids=slots,
        position_ids=slots,
        predicts=scored,
        label_index=torch.randint(1, 30, shape),
        labels=KEPT[torch.randint(0, len(KEPT), shape)],
        prev_ids=slots,
        scored=scored,
        valid=scored,
        rows=scored.flatten().nonzero().squeeze(1),
    )
    hidden = torch.randn(*shape, WIDTH, requires_grad=True)
    return Case(LanguageHead(torch.randn(SIZE, WIDTH)), layout, torch.randn(1, 30, WIDTH), hidden)


def views(made: Case, lm: LanguageHead, **more: Any) -> list[View]:
    """A plain view, and one whose chunks are computed again in the backward pass."""
    plain, again = (View.of(made.hidden, made.layout.rows, lm, **more) for _ in range(2))
    return [plain, replace(again, compose=lm.logits)]


def test_the_product_follows_autocast_and_everything_made_of_it_is_float32(made: Case) -> None:
    """As the draft's own product does. The backward pass runs outside autocast, and the answers must not change."""
    lm = made.full.restrict(KEPT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = Teacher(made.last_hidden, made.layout, made.full)
    rows = made.layout.rows
    hidden = made.last_hidden[0, made.layout.label_index.flatten()[rows] - 1]
    rounded = (hidden.bfloat16() @ made.full.weight.bfloat16().T).float()
    assert torch.equal(half.logits(rows), rounded) and half.logits(rows).dtype == torch.float32
    exact = Teacher(made.last_hidden, made.layout, made.full).logits(rows)
    assert torch.equal(exact, torch.nn.functional.linear(hidden, made.full.weight)) and not torch.equal(exact, rounded)
    log_p = rounded.log_softmax(-1)[:, KEPT].log_softmax(-1)
    for view in views(made, lm):
        (found,) = view.ask(KL(half))
        log_q = torch.log_softmax(view.per_row[0] @ lm.weight.T, -1)
        want = (log_p.exp() * (log_p - log_q)).sum(-1)
        assert found.dtype == torch.float32 and torch.allclose(found.flatten()[rows], want, atol=1e-5)
        pair = [torch.autograd.grad(value.sum(), made.hidden, retain_graph=True)[0] for value in (found, want)]
        assert torch.allclose(*pair, atol=1e-5)


def test_a_head_in_float64_is_left_alone_by_autocast(made: Case) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        teacher = Teacher(made.last_hidden, made.layout, LanguageHead(made.full.weight.double()))
    assert teacher.logits(made.layout.rows).dtype == torch.float64


def count_products(made: Case, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The rows of every product of the teacher from now on."""
    asked: list[Tensor] = []
    product = Teacher.logits
    monkeypatch.setattr(Teacher, "logits", lambda self, rows: asked.append(rows) or product(self, rows))
    return asked


@pytest.mark.parametrize("chunk_rows", [5, None])
def test_a_reduced_head_reads_every_slot_once_a_step(
    made: Case, chunk_rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two passes, the backward pass's second look, the label's own probability and the likeliest token: one product."""
    asked = count_products(made, monkeypatch)
    for view in views(made, made.full.restrict(KEPT), chunk_rows=chunk_rows):
        teacher = Teacher(made.last_hidden, made.layout, made.full)
        asked.clear()
        (overlap,) = view.ask(Overlap(teacher))
        divergence, log_p = view.ask(KL(teacher), TeacherLogProb(teacher, made.layout.labels))
        (overlap + divergence + log_p).sum().backward()
        assert torch.equal(torch.cat(asked), made.layout.rows)
        labels = teacher.labels()
        assert torch.equal(torch.cat(asked), made.layout.rows)
        logits = teacher.logits(made.layout.rows)
        assert torch.equal(labels.flatten()[made.layout.rows], logits.argmax(-1)) and (labels[0, :, 0] == -1).all()


def test_what_would_not_be_small_is_not_kept(made: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole head, other rows than the scored ones, or too many bytes: made per chunk, with the same answers."""
    reduced = made.full.restrict(KEPT)
    asked = count_products(made, monkeypatch)

    def answers(lm: LanguageHead, rows: Tensor, temperature: float) -> list[Tensor]:
        teacher = Teacher(made.last_hidden, made.layout, made.full)
        view, labels = View.of(made.hidden, rows, lm, chunk_rows=4), made.layout.labels
        asked.clear()
        requests = (Overlap(teacher, temperature=temperature), TeacherLogProb(teacher, labels, temperature))
        found = [*view.ask(KL(teacher, temperature=temperature)), *view.ask(*requests)]
        return [*found, torch.autograd.grad(found[0].sum() + found[1].sum(), made.hidden)[0]]

    rows = made.layout.rows
    for temperature in (1.0, 0.5):
        kept = answers(reduced, rows, temperature)
        assert len(torch.cat(asked)) == len(rows)
        assert all(torch.equal(a, b) for a, b in zip(kept, answers(reduced, rows.clone(), temperature), strict=True))
        assert len(torch.cat(asked)) == 2 * len(rows)
        with monkeypatch.context() as patch:
            patch.setattr(teacher_file, "CHUNK_BYTES", 4 * len(KEPT) * len(rows) - 1)
            assert all(torch.equal(a, b) for a, b in zip(kept, answers(reduced, rows, temperature), strict=True))
            assert len(torch.cat(asked)) == 2 * len(rows)
        answers(made.full, rows, temperature)
        assert len(torch.cat(asked)) == 2 * len(rows)


def test_labels_that_are_not_the_layout_s_own_are_looked_up(made: Case) -> None:
    teacher = Teacher(made.last_hidden, made.layout, made.full)
    other = (made.layout.labels + 1) % SIZE
    view = View.of(made.hidden, made.layout.rows, made.full.restrict(KEPT))
    found = view.ask(TeacherLogProb(teacher, other), LabelLogProb(made.layout.labels))[0].flatten()[made.layout.rows]
    law = teacher.logits(made.layout.rows).log_softmax(-1)
    want = law.gather(1, other.flatten()[made.layout.rows, None]).squeeze(1)
    assert torch.allclose(found, want, atol=1e-6)


@pytest.mark.parametrize("size", [5, 8, 19, 24])
def test_the_likeliest_column_is_the_first_of_the_largest(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randint(0, 5, (300, size), generator=generator).float()  # many ties, across runs of 8 columns too
    want = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(argmax(logits, width=8), want)
    assert torch.equal(argmax(torch.full((2, size), -torch.inf), width=8), torch.zeros(2, dtype=torch.long))
