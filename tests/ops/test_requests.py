"""Every question about draft and target against a dense oracle in float64, with autograd for the gradients.

One oracle serves both ways of making gradients: in the forward pass (plain views), and by computing chunks again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from dflash_lightning.ops.lm_head import (
    JSD,
    KL,
    Argmax,
    Chunk,
    Detached,
    Entropy,
    LabelLogProb,
    LanguageHead,
    LogitAt,
    Overlap,
    Renyi,
    Request,
    SoftLabelLogProb,
    Teacher,
    TeacherLogProb,
    TopK,
    View,
)
from dflash_lightning.types import BlockLayout

B, N, K, S, H, V = 2, 2, 3, 9, 5, 11
SLOTS = B * N * K
KEPT = torch.tensor([0, 2, 3, 5, 6, 8, 9])


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_layout(rows: Tensor) -> BlockLayout:
    """Slots with label indices and labels of their own; ``rows`` are scored."""
    generator = torch.Generator().manual_seed(3)
    slots = torch.zeros(B, N, K, dtype=torch.long)
    scored = torch.zeros(SLOTS, dtype=torch.bool).index_fill(0, rows, True).view(B, N, K)
    return BlockLayout(
        anchors=slots[..., 0],
        keep=scored.any(-1),
        context_start=slots[..., 0],
        context_end=slots[..., 0],
        input_ids=slots,
        position_ids=slots,
        predicts=scored,
        label_index=torch.randint(1, S, (B, N, K), generator=generator),
        labels=torch.randint(0, V, (B, N, K), generator=generator),
        prev_ids=slots,
        scored=scored,
        valid=scored,
        rows=rows,
    )


@dataclass
class Case:
    """A teacher, a draft and what an oracle knows of both: dense logits of every slot."""

    head: dict[str, float]
    reduced: bool
    rows: Tensor = field(default_factory=lambda: torch.tensor([0, 1, 3, 4, 6, 7, 8, 10]))

    def __post_init__(self) -> None:
        self.full = LanguageHead(random(V, H, seed=1), random(V, seed=2), **self.head)
        self.lm = self.full.restrict(KEPT) if self.reduced else self.full
        self.layout = make_layout(self.rows)
        self.last_hidden = random(B, S, H, seed=4)
        self.teacher = Teacher(self.last_hidden, self.layout, self.full)
        self.hidden = random(B, N, K, H, seed=5).requires_grad_()
        self.a = random(B, N, K, seed=6).exp().requires_grad_()
        self.b = random(B, N, K, seed=7).exp().requires_grad_()
        before = (self.layout.label_index - 1).flatten(1)
        picked = torch.stack([self.last_hidden[i, before[i]] for i in range(B)]).view(B, N, K, H)
        self.target_logits = self.full.logits(picked)

    def view(self, chunk_rows: int | None = 3) -> View:
        return View.of(self.hidden, self.rows, self.lm, chunk_rows)

    def draft(self, temperature: float = 1.0) -> Tensor:
        return torch.log_softmax(self.lm.logits(self.hidden) / temperature, -1)

    def target(self, temperature: float = 1.0, *, within: bool) -> Tensor:
        """Log-probabilities over the draft's columns, of the whole law or of the law within them."""
        logits = self.target_logits / temperature
        columns = logits[..., KEPT] if self.reduced else logits
        return torch.log_softmax(columns, -1) if within else columns - logits.logsumexp(-1, keepdim=True)

    @property
    def known(self) -> Tensor:
        return torch.isin(self.layout.labels, KEPT) if self.reduced else torch.ones(B, N, K, dtype=torch.bool)

    def label_log_prob(self, temperature: float) -> Tensor:
        columns = torch.searchsorted(KEPT, self.layout.labels).clamp(max=len(KEPT) - 1)
        columns = columns if self.reduced else self.layout.labels
        return self.draft(temperature).gather(-1, columns[..., None]).squeeze(-1).where(self.known, 0.0)

    def overlap(self, temperature: float, *, scaled: bool) -> Tensor:
        p, q = self.target(temperature, within=False).exp(), self.draft(temperature).exp()
        a, b = (self.a[..., None], self.b[..., None]) if scaled else (1.0, 1.0)
        return torch.minimum(a * p, b * q).sum(-1)

    def kl(self, temperature: float, *, reverse: bool) -> Tensor:
        log_p, log_q = self.target(temperature, within=True), self.draft(temperature)
        return (log_q.exp() * (log_q - log_p)).sum(-1) if reverse else (log_p.exp() * (log_p - log_q)).sum(-1)

    def soft_label(self, temperature: float) -> Tensor:
        return (self.target(temperature, within=True).exp() * self.draft(temperature)).sum(-1)

    def renyi(self, temperature: float) -> Tensor:
        """The whole p: the sum over the whole vocabulary, where q is 0 outside the draft's."""
        p, q = self.target(temperature, within=False).exp(), self.draft(temperature).exp()
        return -2 * (p * q).sqrt().sum(-1).log()

    def jsd(self, temperature: float) -> Tensor:
        p, q = self.target(temperature, within=True).exp(), self.draft(temperature).exp()
        mean = (p + q) / 2
        return ((p * (p / mean).log()).sum(-1) + (q * (q / mean).log()).sum(-1)) / 2

    def logit_at(self) -> Tensor:
        columns = torch.searchsorted(KEPT, self.candidates) if self.reduced else self.candidates
        return self.lm.logits(self.hidden).gather(-1, columns)

    @property
    def candidates(self) -> Tensor:
        return KEPT[(self.layout.labels[..., None] + torch.tensor([0, 2])) % len(KEPT)]


Pair = Callable[[Case], tuple[Request, Tensor]]
QUESTIONS: dict[str, Pair] = {
    "label": lambda c: (LabelLogProb(c.layout.labels), c.label_log_prob(1.0)),
    "label at 0.7": lambda c: (LabelLogProb(c.layout.labels, 0.7), c.label_log_prob(0.7)),
    "entropy": lambda c: (Entropy(), -(c.draft().exp() * c.draft()).sum(-1)),
    "overlap": lambda c: (Overlap(c.teacher), c.overlap(1.0, scaled=False)),
    "overlap at 2": lambda c: (Overlap(c.teacher, temperature=2.0), c.overlap(2.0, scaled=False)),
    "scaled overlap": lambda c: (Overlap(c.teacher, c.a, c.b), c.overlap(1.0, scaled=True)),
    "fixed scales": lambda c: (Overlap(c.teacher, c.a.detach(), c.b.detach(), 2.0), c.overlap(2.0, scaled=True)),
    "forward": lambda c: (KL(c.teacher), c.kl(1.0, reverse=False)),
    "forward at 2": lambda c: (KL(c.teacher, temperature=2.0), c.kl(2.0, reverse=False)),
    "reverse": lambda c: (KL(c.teacher, reverse=True), c.kl(1.0, reverse=True)),
    "reverse at 0.5": lambda c: (KL(c.teacher, True, 0.5), c.kl(0.5, reverse=True)),
    "jsd": lambda c: (JSD(c.teacher), c.jsd(1.0)),
    "soft label": lambda c: (SoftLabelLogProb(c.teacher), c.soft_label(1.0)),
    "soft label at 2": lambda c: (SoftLabelLogProb(c.teacher, 2.0), c.soft_label(2.0)),
    "renyi": lambda c: (Renyi(c.teacher), c.renyi(1.0)),
    "renyi at 0.5": lambda c: (Renyi(c.teacher, 0.5), c.renyi(0.5)),
    "logits": lambda c: (LogitAt(c.candidates), c.logit_at()),
}
CASES = [({}, False), ({"softcap": 2.5}, True), ({"scale": 1.7, "softcap": 3.0}, False), ({"scale": 0.4}, True)]


@pytest.mark.parametrize(("settings", "reduced"), CASES)
@pytest.mark.parametrize("name", QUESTIONS)
def test_values_and_gradients_equal_dense_autograd(name: str, settings: dict[str, float], reduced: bool) -> None:
    """Two chunk sizes, and once more with the chunks computed again in the backward pass (a view with compose)."""
    case = Case(settings, reduced)
    request, oracle = QUESTIONS[name](case)
    in_rows = case.layout.scored
    weights = random(*oracle.shape, seed=9) * in_rows.view(*in_rows.shape, *[1] * (oracle.dim() - 3))
    wanted = [case.hidden, *(tensor for tensor in request.inputs if tensor.requires_grad)]
    expected = torch.autograd.grad((weights * oracle).sum(), wanted, retain_graph=True)
    composed = case.view()
    composed.compose = case.lm.logits
    for view in (case.view(), case.view(None), composed):
        (answer,) = view.ask(request)
        gradients = torch.autograd.grad((weights * answer).sum(), wanted)
        assert (answer - oracle)[in_rows].abs().max() < 1e-12 and answer[~in_rows].abs().max() == 0
        for gradient, want in zip(gradients, expected, strict=True):
            assert (gradient - want).abs().max() < 1e-12 and want.abs().max() > 1e-3
    assert {request.has_gradient for request in (JSD(case.teacher), LogitAt(case.candidates))} == {False}


def test_all_questions_in_one_call_share_their_chunks_and_keep_their_gradients() -> None:
    """Some with a gradient of their own, some computed again, some that carry none."""
    case = Case({"softcap": 3.0}, reduced=True)
    pairs = [pair(case) for name, pair in QUESTIONS.items() if name != "fixed scales"]  # its oracle's are not fixed
    requests = [request for request, _ in pairs]
    view = case.view()
    view.plan(Argmax())
    answers = view.ask(*requests, TeacherLogProb(case.teacher, case.layout.labels), TopK(2))
    (best,) = view.ask(Argmax())
    total = sum((answer.sum() for answer in answers[: len(pairs)]), torch.zeros(()))
    oracle = sum((want[case.layout.scored].sum() for _, want in pairs), torch.zeros(()))
    wanted = [case.hidden, case.a, case.b]
    found, expected = torch.autograd.grad(total, wanted), torch.autograd.grad(oracle, wanted)
    assert all((f - e).abs().max() < 1e-12 for f, e in zip(found, expected, strict=True))
    assert not answers[-1].requires_grad and not answers[-2].requires_grad
    order = KEPT[case.lm.logits(case.hidden).argsort(-1, descending=True)][..., :2]
    assert torch.equal(answers[-1], order.where(case.layout.scored[..., None], -1))
    assert torch.equal(best, answers[-1][..., 0])


def test_a_detached_answer_has_no_gradient_and_takes_the_place_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked beside the answer with a gradient, before or after, it is that answer: nothing is computed twice."""
    made = []
    value = Overlap.value
    monkeypatch.setattr(Overlap, "value", lambda self, chunk: made.append(self) or value(self, chunk))
    case = Case({}, reduced=True)
    overlap, alone = Overlap(case.teacher), Detached(Overlap(case.teacher))
    for asked in ([[alone, overlap]], [[overlap], [alone]], [[overlap, alone]]):
        view = case.view(None)
        answers = {request: answer for some in asked for request, answer in zip(some, view.ask(*some), strict=True)}
        assert len(made) == 1 and not answers[alone].requires_grad and answers[overlap].requires_grad
        assert torch.equal(answers[alone], answers[overlap]) and alone != overlap
        made.clear()
    view = case.view(None)
    view.plan(alone)
    (answer,) = view.ask(overlap)
    assert len(made) == 1 and torch.equal(view.ask(alone)[0], answer) and len(made) == 1
    monkeypatch.setattr(Overlap, "gradient", lambda *given: pytest.fail("a gradient was made that nobody wants"))
    (found,) = case.view(None).ask(alone)
    assert torch.equal(found, answer) and not found.requires_grad


def test_the_teacher_speaks_from_the_row_before_the_label_over_the_whole_vocabulary() -> None:
    case = Case({"scale": 1.3}, reduced=True)
    (log_p,) = case.view().ask(TeacherLogProb(case.teacher, case.layout.labels, 0.5))
    law = torch.log_softmax(case.target_logits / 0.5, -1)
    want = law.gather(-1, case.layout.labels[..., None]).squeeze(-1)
    scored = case.layout.scored
    assert (log_p - want)[scored].abs().max() < 1e-12 and log_p[~scored].abs().max() == 0
    labels = case.teacher.labels()
    assert torch.equal(labels, case.target_logits.argmax(-1).where(scored, -1)) and labels is case.teacher.labels()
    assert not torch.isin(labels[scored], KEPT).all(), "no label is outside the draft's vocabulary: nothing is shown"


def test_an_overlap_with_a_reduced_vocabulary_never_exceeds_the_mass_that_it_holds() -> None:
    """The whole p, not p within the vocabulary: verification draws from the whole one."""
    case = Case({}, reduced=True)
    mass = case.target(within=False).exp().sum(-1)
    (overlap,) = case.view().ask(Overlap(case.teacher))
    assert (overlap <= mass + 1e-12).all() and mass.min() < 0.5


A_P, A_Q = [0.6, 0.3, 0.1], [0.2, 0.5, 0.3]


def example(p: list[float], q: list[float]) -> tuple[View, Teacher, Tensor]:
    """One slot whose laws are p and q: the head is the identity on logarithms."""
    size = len(p)
    layout = make_layout(torch.tensor([0]))
    lm = LanguageHead(torch.eye(size, dtype=torch.float64))
    last_hidden = torch.tensor(p, dtype=torch.float64).log().expand(B, S, size)
    hidden = torch.tensor(q, dtype=torch.float64).log().expand(B, N, K, size).clone().requires_grad_()
    return View.of(hidden, layout.rows, lm), Teacher(last_hidden, layout, lm), hidden


@pytest.mark.parametrize(
    ("ask", "value", "gradient"),
    [
        (lambda t: Overlap(t), 0.6, (0.16, -0.1, -0.06)),
        (lambda t: KL(t), 0.396058, (-0.4, 0.2, 0.2)),
        (lambda t: KL(t, reverse=True), 0.365274, (-0.292777, 0.072776, 0.220001)),
        (lambda t: JSD(t), 0.091121, None),
        (lambda t: Renyi(t), 0.195416, (-0.181966, 0.072949, 0.109017)),
        (lambda t: KL(t, temperature=2.0), 0.425221 / 4, None),
        (lambda t: KL(t, reverse=True, temperature=2.0), 0.402114 / 4, None),
    ],
)
def test_worked_example_a(ask: Callable[[Teacher], Request], value: float, gradient: tuple[float, ...] | None) -> None:
    view, teacher, hidden = example(A_P, A_Q)
    (answer,) = view.ask(ask(teacher))
    (found,) = torch.autograd.grad(answer[0, 0, 0], hidden)
    assert answer[0, 0, 0].item() == pytest.approx(value, abs=1e-6)
    assert gradient is None or found[0, 0, 0].tolist() == pytest.approx(gradient, abs=1e-6)


def test_equal_laws_have_no_divergence_and_no_gradient() -> None:
    view, teacher, hidden = example(A_P, A_P)
    answers = view.ask(KL(teacher), KL(teacher, reverse=True), JSD(teacher))
    assert [round(answer[0, 0, 0].item(), 12) for answer in answers] == [0.0, 0.0, 0.0]
    assert view.ask(Overlap(teacher))[0][0, 0, 0].item() == pytest.approx(1.0)
    (gradient,) = torch.autograd.grad(sum(answer.sum() for answer in answers), hidden)
    assert gradient.abs().max() < 1e-12


class LowRank(torch.nn.Module):
    """Logits of the frozen head plus a trainable product with an embedding of the token before."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(random(V, 2, seed=11))
        self.up = torch.nn.Parameter(random(2, V, seed=12))

    def view(self, case: Case, chunk_rows: int | None = 3) -> View:
        def compose(hidden: Tensor, previous: Tensor, table: Tensor, up: Tensor) -> Tensor:
            return case.lm.logits(hidden) + table[previous] @ up

        picked = case.hidden.flatten(0, 2)[case.rows], case.layout.labels.flatten()[case.rows]
        shared = (self.table, self.up)
        return View(picked, case.rows, (B, N, K), case.lm, shared, compose, chunk_rows)


def test_trainable_shared_tensors_get_the_gradients_of_a_dense_oracle() -> None:
    case, part = Case({"softcap": 3.0}, reduced=False), LowRank()
    requests = [LabelLogProb(case.layout.labels), KL(case.teacher), Overlap(case.teacher, case.a, case.b), Argmax()]
    answers = part.view(case).ask(*requests)
    log_q = torch.log_softmax(case.lm.logits(case.hidden) + part.table[case.layout.labels] @ part.up, -1)
    log_p, scored = case.target(within=True), case.layout.scored
    scaled = torch.minimum(case.a[..., None] * log_p.exp(), case.b[..., None] * log_q.exp()).sum(-1)
    wants = [
        log_q.gather(-1, case.layout.labels[..., None]).squeeze(-1),
        (log_p.exp() * (log_p - log_q)).sum(-1),
        scaled,
    ]
    wanted = [case.hidden, part.table, part.up, case.a, case.b]
    weights = [random(B, N, K, seed=20 + i) for i in range(3)]
    oracle = sum((w * want)[scored].sum() for w, want in zip(weights, wants, strict=True))
    found = torch.autograd.grad(sum((w * a).sum() for w, a in zip(weights, answers, strict=False)), wanted)
    expected = torch.autograd.grad(oracle, wanted)
    assert all((a - want)[scored].abs().max() < 1e-12 for a, want in zip(answers, wants, strict=False))
    assert all((f - e).abs().max() < 1e-12 for f, e in zip(found, expected, strict=True))
    assert torch.equal(answers[3][scored], log_q.argmax(-1)[scored])


def test_nan_in_a_row_without_incoming_gradient_reaches_no_shared_tensor() -> None:
    """The chunk is computed again without that row: 0 * NaN would be NaN in all that rows share."""
    case, part = Case({}, reduced=False), LowRank()
    bad = int(case.rows[2])
    values = case.hidden.detach().clone()
    values.view(SLOTS, H)[bad] = math.nan
    case.hidden = values.requires_grad_()
    (overlap,) = part.view(case).ask(Overlap(case.teacher, case.a, case.b))
    good = case.layout.scored & (torch.arange(SLOTS).view(B, N, K) != bad)
    gradients = torch.autograd.grad(torch.where(good, overlap, 0.0).sum(), [case.hidden, part.table, part.up, case.a])
    assert all(gradient.isfinite().all() and gradient.abs().max() > 0 for gradient in gradients)
    assert gradients[0].view(SLOTS, H)[bad].abs().max() == 0 == gradients[3].flatten()[bad]


def test_no_rows_give_every_shared_tensor_a_gradient_of_zero() -> None:
    case, part = Case({}, reduced=False, rows=torch.zeros(0, dtype=torch.long)), LowRank()
    (value,) = part.view(case).ask(LabelLogProb(case.layout.labels))
    value.sum().backward()
    assert value.abs().max() == 0 and all(p.grad is not None and not p.grad.any() for p in part.parameters())


def test_a_candidate_without_a_row_in_the_reduced_head_has_probability_zero() -> None:
    case = Case({}, reduced=True)
    candidates = torch.tensor([[1, 2]]).expand(B, N, K, 2).clone()
    (logits,) = case.view().ask(LogitAt(candidates))
    scored = case.layout.scored
    assert (logits[scored][:, 0] == -math.inf).all() and logits[scored][:, 1].isfinite().all()
    (gradient,) = torch.autograd.grad(logits[scored].exp().sum(), case.hidden)
    assert gradient.isfinite().all() and gradient.abs().max() > 0


@dataclass(frozen=True, eq=False)
class RowsOf(Request):
    """The number of rows of the chunk, asked beside a teacher of ``columns`` columns."""

    wide: int

    @property
    def columns(self) -> int:
        return self.wide

    def value(self, chunk: Chunk) -> Tensor:
        return torch.full_like(chunk.log_normaliser, len(chunk.rows))


def test_chunks_are_small_enough_for_the_teacher_s_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reduced head has few columns; the logits of its teacher have all of them."""
    monkeypatch.setattr("dflash_lightning.ops.logit_pass.chunk_bytes", lambda device: 4 * 7 * 8)
    case = Case({}, reduced=True)
    for wide, rows in ((0, 8), (28, 2), (100, 1)):
        (held,) = case.view(None).ask(RowsOf(wide))
        assert held[case.layout.scored].max() == rows, wide
    assert Overlap(case.teacher).columns == KL(case.teacher).columns == JSD(case.teacher).columns == V


def test_a_view_holds_what_fits_together() -> None:
    case = Case({}, reduced=False)
    with pytest.raises(AssertionError, match="lacks rows"):
        View((case.hidden.flatten(0, 2),), case.rows, (B, N, K), case.lm)
    with pytest.raises(AssertionError, match="hidden rows of 5 for a head of 4"):
        View.of(case.hidden, case.rows, LanguageHead(torch.zeros(V, 4)))
    with pytest.raises(AssertionError, match="no use without compose"):
        View((case.hidden.flatten(0, 2)[case.rows],), case.rows, (B, N, K), case.lm, (torch.zeros(2),))
    with pytest.raises(AssertionError, match="whole head"):
        Teacher(case.last_hidden, case.layout, case.full.restrict(KEPT))
