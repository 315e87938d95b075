"""The chunked language head against dense logits and plain autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_lightning.ops.lm_head import Argmax, Chunk, Entropy, LabelLogProb, LanguageHead, Request, View

B, N, K, H, V = 2, 3, 4, 8, 50
SLOTS = B * N * K


def make_head(*, dtype: torch.dtype = torch.float64, ids: Tensor | None = None, **settings: float) -> LanguageHead:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64).to(dtype)
    bias = torch.randn(V, generator=generator, dtype=torch.float64).to(dtype)
    head = LanguageHead(weight, bias, **settings)
    return head if ids is None else head.restrict(ids)


def make_slots(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states that want a gradient, labels, and 17 of the 24 slots as rows."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(B, N, K, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (B, N, K), generator=generator)
    rows = torch.randperm(SLOTS, generator=generator)[:17].sort().values
    return hidden, labels, rows


def dense_logits(hidden: Tensor, head: LanguageHead) -> Tensor:
    logits = hidden @ head.weight.T + head.bias
    logits = logits * head.scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def dense_label_log_prob(hidden: Tensor, labels: Tensor, head: LanguageHead) -> Tensor:
    return torch.log_softmax(dense_logits(hidden, head), -1).gather(-1, labels[..., None]).squeeze(-1)


def dense_entropy(hidden: Tensor, labels: Tensor, head: LanguageHead) -> Tensor:
    log_probs = torch.log_softmax(dense_logits(hidden, head), -1)
    return -(log_probs.exp() * log_probs).sum(-1)


ORACLES: dict[type, Callable[[Tensor, Tensor, LanguageHead], Tensor]] = {
    LabelLogProb: dense_label_log_prob,
    Entropy: dense_entropy,
}
HEADS = [{}, {"scale": 0.3}, {"softcap": 2.5}, {"scale": 1.7, "softcap": 3.0}]


@pytest.mark.parametrize("settings", HEADS)
@pytest.mark.parametrize("chunk_rows", [1, 5, 17, None])
def test_answers_and_gradients_equal_dense_autograd(settings: dict[str, float], chunk_rows: int | None) -> None:
    head = make_head(**settings)
    hidden, labels, rows = make_slots()
    weights = torch.randn(2, B, N, K, dtype=torch.float64)
    in_rows = torch.zeros(SLOTS, dtype=torch.bool).index_fill(0, rows, True).view(B, N, K)

    oracle = [ORACLES[kind](hidden, labels, head) * in_rows for kind in (LabelLogProb, Entropy)]
    (expected,) = torch.autograd.grad(sum((w * o).sum() for w, o in zip(weights, oracle, strict=True)), hidden)
    answers = View.of(hidden, rows, head, chunk_rows).ask(LabelLogProb(labels), Argmax(), Entropy())
    (gradient,) = torch.autograd.grad((weights[0] * answers[0] + weights[1] * answers[2]).sum(), hidden)

    assert answers[0].dtype == torch.float64 and answers[1].dtype == torch.int64
    assert (answers[0] - oracle[0]).abs().max() < 1e-10
    assert (answers[2] - oracle[1]).abs().max() < 1e-10
    assert torch.equal(answers[1], dense_logits(hidden, head).argmax(-1).masked_fill(~in_rows, -1))
    assert (gradient - expected).abs().max() < 1e-10
    assert gradient[in_rows].abs().min() > 0 and gradient[~in_rows].abs().max() == 0


def test_fp32_is_as_close_to_float64_as_dense_fp32_is() -> None:
    exact = [t.detach() for t in make_slots()]
    want = dense_label_log_prob(exact[0], exact[1], make_head())
    hidden, labels, rows = make_slots(torch.float32)
    head = make_head(dtype=torch.float32)
    (log_prob,) = View.of(hidden, rows, head, 3).ask(LabelLogProb(labels))
    assert log_prob.dtype == torch.float32
    picked = log_prob.flatten()[rows].double() - want.flatten()[rows]
    assert picked.abs().max() < 2e-6


def test_peaked_distributions_stay_exact() -> None:
    """Logits of +-300: the far tail is floored at exp(-60) of the peak, which neither value nor gradient may show."""
    hidden, labels, rows = make_slots()
    hidden = (hidden.detach() * 30).requires_grad_()
    head = make_head()
    oracle = dense_label_log_prob(hidden, labels, head).flatten()[rows]
    (expected,) = torch.autograd.grad(oracle.sum(), hidden)
    (log_prob,) = View.of(hidden, rows, head).ask(LabelLogProb(labels))
    (gradient,) = torch.autograd.grad(log_prob.sum(), hidden)
    assert oracle.min() < -200
    assert (log_prob.flatten()[rows] - oracle).abs().max() < 1e-10
    assert (gradient - expected).abs().max() < 1e-10


def test_entropy_of_equal_logits_is_log_of_their_number() -> None:
    head = LanguageHead(torch.zeros(V, H))
    (entropy,) = View.of(torch.randn(1, 1, 2, H), torch.tensor([1]), head).ask(Entropy())
    assert entropy.tolist() == [[[0.0, pytest.approx(math.log(V), rel=1e-6)]]]


def test_reduced_head_scores_its_own_tokens_only() -> None:
    """Labels outside the ids: log-probability 0, no gradient; argmax speaks in token ids of the target."""
    ids = torch.tensor([3, 7, 8, 20, 41, 49])
    hidden, labels, rows = make_slots()
    labels = ids[labels % len(ids)]
    labels[0, 0] = torch.tensor([0, 9, 48, 21])
    rows = torch.arange(SLOTS)
    full, reduced = make_head(softcap=4.0), make_head(softcap=4.0, ids=ids)
    known = torch.isin(labels, ids)

    logits = dense_logits(hidden, full)[..., ids]
    columns = torch.searchsorted(ids, labels).clamp(max=len(ids) - 1)
    oracle = torch.log_softmax(logits, -1).gather(-1, columns[..., None]).squeeze(-1).where(known, 0.0)
    (expected,) = torch.autograd.grad(oracle.sum(), hidden)
    log_prob, best = View.of(hidden, rows, reduced, 5).ask(LabelLogProb(labels), Argmax())
    (gradient,) = torch.autograd.grad(log_prob.sum(), hidden)

    assert (~known).sum() == 4
    assert (log_prob - oracle).abs().max() < 1e-10 and log_prob[~known].abs().max() == 0
    assert (gradient - expected).abs().max() < 1e-10 and gradient[~known].abs().max() == 0
    assert torch.equal(best, ids[logits.argmax(-1)])


def test_restricting_twice_equals_restricting_once() -> None:
    head = make_head(softcap=4.0, scale=0.5)
    once = head.restrict(torch.tensor([7, 41]))
    twice = head.restrict(torch.tensor([3, 7, 20, 41])).restrict(torch.tensor([7, 41]))
    hidden = torch.randn(5, H, dtype=torch.float64)
    assert torch.equal(once.logits(hidden), twice.logits(hidden))
    assert torch.allclose(once.logits(hidden), dense_logits(hidden, head)[:, [7, 41]], rtol=0, atol=1e-12)
    assert twice.ids is not None and twice.ids.tolist() == [7, 41]


@pytest.mark.parametrize("ids, words", [([7, 3], "sorted and distinct"), ([3, 3], "sorted"), ([3, 50], "no row")])
def test_restrict_refuses_ids_it_cannot_keep(ids: list[int], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        make_head().restrict(torch.tensor(ids))


def test_nan_in_a_row_without_incoming_gradient_reaches_nothing() -> None:
    hidden, labels, rows = make_slots()
    bad, good = int(rows[4]), [int(r) for r in rows if r != rows[4]]
    values = hidden.detach().clone()
    values.view(SLOTS, H)[bad] = math.nan
    hidden = values.requires_grad_()
    (log_prob,) = View.of(hidden, rows, make_head(), 6).ask(LabelLogProb(labels))
    chosen = torch.zeros(SLOTS, dtype=torch.bool).index_fill(0, torch.tensor(good), True).view(B, N, K)
    torch.where(chosen, log_prob, 0.0).sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()
    assert hidden.grad.view(SLOTS, H)[bad].abs().max() == 0
    assert hidden.grad.view(SLOTS, H)[good].abs().amax(-1).min() > 0


def test_no_rows_give_zeros_that_still_reach_every_parameter() -> None:
    layer = torch.nn.Linear(H, H)
    hidden = layer(torch.randn(B, N, K, H))
    labels = torch.zeros(B, N, K, dtype=torch.long)
    log_prob, best = View.of(hidden, torch.zeros(0, dtype=torch.long), make_head(dtype=torch.float32)).ask(
        LabelLogProb(labels), Argmax()
    )
    log_prob.sum().backward()
    assert log_prob.abs().max() == 0 and (best == -1).all()
    assert all(p.grad is not None and p.grad.abs().max() == 0 for p in layer.parameters())


def test_no_gradient_is_made_when_none_is_wanted() -> None:
    hidden, labels, rows = make_slots()
    for view, grad in (
        (View.of(hidden, rows, make_head()), False),
        (View.of(hidden.detach(), rows, make_head()), True),
    ):
        with torch.set_grad_enabled(grad), CountProducts() as products:
            (log_prob,) = view.ask(LabelLogProb(labels))
        assert not log_prob.requires_grad and products.count == 1


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
def test_autocast_multiplies_in_bf16_and_reduces_in_fp32(weight: torch.dtype) -> None:
    hidden, labels, rows = make_slots(torch.float32)
    head = make_head(dtype=weight)
    with torch.autocast("cpu", torch.bfloat16):
        (log_prob,) = View.of(hidden, rows, head).ask(LabelLogProb(labels))
    log_prob.sum().backward()
    assert log_prob.dtype == torch.float32 and hidden.grad is not None and hidden.grad.dtype == torch.float32

    picked = hidden.detach().flatten(0, 2)[rows].bfloat16()
    assert head.bias is not None
    logits = torch.nn.functional.linear(picked, head.weight.bfloat16(), head.bias.bfloat16()).float()
    want = torch.log_softmax(logits, -1).gather(1, labels.flatten()[rows][:, None]).squeeze(1)
    assert torch.allclose(log_prob.flatten()[rows], want, rtol=0, atol=1e-5)
    exact = make_slots()
    dense_label_log_prob(exact[0], exact[1], make_head()).flatten()[rows].sum().backward()
    assert exact[0].grad is not None
    assert (hidden.grad.double() - exact[0].grad)[..., :].flatten(0, 2)[rows].abs().max() < 0.05


def test_bf16_weights_without_autocast_take_fp32_hidden_states() -> None:
    hidden, labels, rows = make_slots(torch.float32)
    (log_prob,) = View.of(hidden, rows, make_head(dtype=torch.bfloat16)).ask(LabelLogProb(labels))
    log_prob.sum().backward()
    assert log_prob.dtype == torch.float32 and hidden.grad is not None and hidden.grad.dtype == torch.float32


def test_cast_weights_follow_the_weight() -> None:
    """The bf16 copy is kept between steps, but not beyond a change of the weights."""
    head = make_head(dtype=torch.float32)
    first = head.cast(torch.bfloat16)[0]
    assert head.cast(torch.bfloat16)[0] is first
    head.weight.mul_(2.0)
    assert torch.equal(head.cast(torch.bfloat16)[0], head.weight.bfloat16())


@pytest.mark.parametrize("recomputed", [False, True])
def test_autocast_casts_the_whole_weight_once_and_means_the_same_in_a_view_with_compose(recomputed: bool) -> None:
    """Logits of a composed view are made by ``LanguageHead.logits``, chunk after chunk, forward and backward."""
    hidden, labels, rows = make_slots(torch.float32)
    head = make_head(dtype=torch.float32, softcap=3.0)
    with torch.autocast("cpu", torch.bfloat16):
        view = View.of(hidden, rows, head, 2)
        view.compose = head.logits if recomputed else None
        (log_prob,) = view.ask(LabelLogProb(labels))
        kept = head.cast(torch.bfloat16)[0]
        (plain,) = View.of(hidden, rows, head).ask(LabelLogProb(labels))
    gradients = [torch.autograd.grad(answer.sum(), hidden)[0] for answer in (log_prob, plain)]
    assert torch.allclose(log_prob, plain, rtol=0, atol=0.02 if recomputed else 1e-6)  # capped in bf16, or in fp32
    assert (gradients[0] - gradients[1]).abs().max() < 0.1 < gradients[1].abs().max()
    assert head.cast(torch.bfloat16)[0] is kept and len(head._casts) == 1


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.largest = max(self.largest, value.numel())
        return result


class CountProducts(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_nothing_larger_than_a_chunk_of_logits_ever_exists() -> None:
    hidden, labels, rows = make_slots()
    request = LabelLogProb(labels)
    with LargestTensor() as tensors:
        log_prob, entropy, _ = View.of(hidden, rows, make_head(), 12).ask(request, Entropy(), Argmax())
        (log_prob + entropy).sum().backward()
    assert tensors.largest == 9 * V  # 17 rows as 9 + 8: more than the weight (8 x 50), less than all rows
    assert len(rows) * V > 9 * V


def test_one_product_per_chunk_and_one_per_differentiable_request() -> None:
    hidden, labels, rows = make_slots()
    view = View.of(hidden, rows, make_head(), 9)
    with CountProducts() as products:
        answers = view.ask(LabelLogProb(labels), Entropy(), Argmax())
    assert products.count == 2 * (1 + 2)
    with CountProducts() as products:
        (answers[0] + answers[1]).sum().backward()
    assert products.count == 0


def test_a_question_asked_again_is_not_computed_again() -> None:
    hidden, labels, rows = make_slots()
    view = View.of(hidden, rows, make_head())
    view.plan(Argmax())
    (log_prob,) = view.ask(LabelLogProb(labels))
    with CountProducts() as products, torch.no_grad():
        again, best = view.ask(LabelLogProb(labels), Argmax())
    assert products.count == 0 and not again.requires_grad
    assert torch.equal(again, log_prob) and (best.flatten()[rows] >= 0).all()
    other = View.of(hidden, rows, make_head()).ask(LabelLogProb(labels.clone().fill_(1)))[0]
    assert not torch.equal(view.ask(LabelLogProb(labels.clone().fill_(1)))[0], log_prob)
    assert torch.equal(view.ask(LabelLogProb(labels.clone().fill_(1)))[0], other)


def test_an_answer_without_gradient_is_computed_anew_when_a_loss_asks() -> None:
    hidden, labels, rows = make_slots()
    view = View.of(hidden, rows, make_head())
    with torch.no_grad():
        view.ask(LabelLogProb(labels))
    (log_prob,) = view.ask(LabelLogProb(labels))
    (gradient,) = torch.autograd.grad(log_prob.sum(), hidden)
    assert gradient.abs().max() > 0


def test_two_losses_on_one_answer_add_their_gradients() -> None:
    hidden, labels, rows = make_slots()
    view = View.of(hidden, rows, make_head())
    (one,) = torch.autograd.grad(view.ask(LabelLogProb(labels))[0].sum(), hidden)
    view = View.of(hidden, rows, make_head())
    total = view.ask(LabelLogProb(labels))[0].sum() + 2 * view.ask(LabelLogProb(labels))[0].sum()
    (three,) = torch.autograd.grad(total, hidden)
    assert torch.allclose(three, 3 * one, rtol=0, atol=1e-12)


def test_logits_equal_the_dense_formula_and_reach_the_hidden_states() -> None:
    head = make_head(scale=1.7, softcap=3.0)
    hidden = torch.randn(2, 3, H, dtype=torch.float64, requires_grad=True)
    assert torch.allclose(head.logits(hidden), dense_logits(hidden, head), rtol=0, atol=1e-12)
    assert head.logits(hidden).abs().max() <= 3.0
    assert torch.autograd.gradcheck(head.logits, hidden)


@dataclass(frozen=True, eq=False)
class Column(Request):
    """The logit of one column: what a request of one's own looks like."""

    column: int

    def value(self, chunk: Chunk) -> Tensor:
        return chunk.logits[:, self.column].clone()


@dataclass(frozen=True, eq=False)
class FastColumn(Column):
    """The same with a gradient of its own, which a frozen plain view makes in the forward pass."""

    def gradient(self, chunk: Chunk, out: Tensor) -> None:
        out.zero_()[:, self.column] = 1.0


@pytest.mark.parametrize("kind", [Column, FastColumn])
def test_a_new_question_is_one_class(kind: type[Column]) -> None:
    """Beside others: no request's gradient touches what the next one reads."""
    head = make_head(scale=1.7, softcap=3.0)
    hidden, labels, rows = make_slots()
    first, log_prob, second = View.of(hidden, rows, head, 4).ask(kind(3), LabelLogProb(labels), kind(8))
    (gradient,) = torch.autograd.grad((first + 2 * log_prob + 3 * second).sum(), hidden)
    logits = dense_logits(hidden, head)
    want = logits[..., 3] + 2 * dense_label_log_prob(hidden, labels, head) + 3 * logits[..., 8]
    (expected,) = torch.autograd.grad(want.flatten()[rows].sum(), hidden)
    assert (gradient - expected).abs().max() < 1e-10
    assert (second.flatten()[rows] - logits[..., 8].flatten()[rows]).abs().max() < 1e-10


def test_questions_are_compared_by_their_kind_their_settings_and_the_identity_of_tensors() -> None:
    labels = torch.zeros(B, N, K, dtype=torch.long)
    assert LabelLogProb(labels) == LabelLogProb(labels) and hash(LabelLogProb(labels)) == hash(LabelLogProb(labels))
    others = [LabelLogProb(labels.clone()), LabelLogProb(labels, 2.0), Entropy(), Column(3), FastColumn(3)]
    assert len({LabelLogProb(labels), *others}) == 6
