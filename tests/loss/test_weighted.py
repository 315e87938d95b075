"""The family of weighted losses on one example of five slots and three tokens, by worked numbers and by differences."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, ClassVar

import pytest
import torch
from jaxtyping import TypeCheckError
from omegaconf import OmegaConf
from torch import Tensor

from dflash_lightning.block import count_slots
from dflash_lightning.loss import ConfidenceLoss, CrossEntropy, DPace, LossTerm, SlotwiseLoss, WeightedLoss
from dflash_lightning.loss.base import blocks_of_document
from dflash_lightning.loss.weights import first_failure, suffix
from dflash_lightning.ops.lm_head import HeadOutput, LanguageHead, Teacher, View
from dflash_lightning.recipe import load_recipe
from dflash_lightning.recipe.make import make
from dflash_lightning.types import FeatureSpec, SlotTotals, StepContext

CTX = StepContext(0, 1, 0)
P = [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.4, 0.35, 0.25]]
Q = [[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.3, 0.4, 0.3], [0.1, 0.3, 0.6], [0.2, 0.6, 0.2]]
BEST = [0, 1, 0, 2, 0]  # of p, which the labels are; q is right at slots 1, 2 and 4, so the first failure is slot 3
P64, Q64 = (torch.tensor([law], dtype=torch.float64) for law in (P, Q))


@pytest.fixture
def made(table: Callable[..., Any]) -> Callable[..., Any]:
    """``made(valid=None, p=P, q=Q, labels=BEST)``: the example as a table."""

    def make(valid: list[int] | None = None, p: Tensor = P64, q: Tensor = Q64, labels: list[int] = BEST) -> Any:
        return table(q, p, torch.tensor([labels]), None if valid is None else torch.tensor([valid]).bool())

    return make


def numerator(term: LossTerm, made: Any) -> Tensor:
    return term.numerator(made.out, made.layout, made.teacher, CTX)


def total_of(term: LossTerm, made: Any) -> float:
    return float(numerator(term, made).detach())


def value(term: LossTerm, made: Any) -> float:
    return total_of(term, made) / float(term.denominator(count_slots(made.layout, 5)))


def weights(term: WeightedLoss, made: Any) -> list[float]:
    found = torch.where(made.layout.valid, term.weights(made.out, made.layout, made.teacher), 0.0)
    assert not found.requires_grad
    return found[0, 0, 1:].tolist()


def gradient(term: LossTerm, made: Any) -> Tensor:
    return torch.autograd.grad(numerator(term, made), made.hidden)[0][0, 0, 1:]


# -- numbers of single slots ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "numbers"),
    [
        ("ce", (0.510826, 0.693147, 1.203973, 0.510826, 1.609438)),
        ("soft_ce", (0.828631, 0.835859, 1.117668, 1.007807, 1.224924)),
        ("tv", (0.1, 0.3, 0.2, 0.1, 0.25)),
        ("nla", (0.105361, 0.356675, 0.223144, 0.105361, 0.287682)),
        ("renyi", (0.014003, 0.108739, 0.043147, 0.027447, 0.071862)),
        ("forward_kl", (0.026812, 0.196827, 0.088015, 0.057536, 0.144396)),
    ],
)
def test_numbers_of_the_example(made: Any, loss: Any, numbers: tuple[float, ...]) -> None:
    term, example = WeightedLoss(loss=loss), made()
    found = term.per_slot(example.out, example.layout, example.teacher)
    assert found[0, 0, 1:].tolist() == pytest.approx(numbers, abs=1e-6)
    assert value(term, example) == pytest.approx(sum(numbers) / 5, abs=1e-6)
    smooth = [1, 2, 4]  # p and q tie at a token of the others, where an overlap has a kink
    assert torch.allclose(gradient(term, example)[smooth], differences(term, example)[smooth], atol=1e-6)


def differences(term: LossTerm, made: Any, step: float = 1e-6) -> Tensor:
    """The gradient with the weights held still, by differences of the slots' own numbers."""
    fixed = made.layout.valid * term.weights(made.out, made.layout, made.teacher)  # type: ignore[attr-defined]
    logits, found = made.hidden.detach(), torch.zeros_like(made.hidden)
    for place in logits.nonzero().tolist():
        ends = []
        for sign in (1, -1):
            made.hidden = logits.clone().requires_grad_()
            made.hidden.data[tuple(place)] += sign * step
            ends.append((fixed * term.per_slot(made.out, made.layout, made.teacher)).sum())  # type: ignore[attr-defined]
        found[tuple(place)] = (ends[0] - ends[1]).detach() / (2 * step)
    made.hidden = logits.requires_grad_()
    return found[0, 0, 1:]


A = {"p": torch.tensor([[[0.6, 0.3, 0.1]]]).double(), "q": torch.tensor([[[0.2, 0.5, 0.3]]]).double(), "labels": [2]}


def test_lk_losses_on_their_worked_example(made: Any) -> None:
    """Overlap .6: LK-alpha .510826, and its gradient that of total variation over .6; the hybrid with share .165299."""
    assert value(WeightedLoss(loss="nla"), made(**A)) == pytest.approx(0.510826, abs=1e-6)
    ratio = gradient(WeightedLoss(loss="nla"), made(**A)) / gradient(WeightedLoss(loss="tv"), made(**A))
    assert ratio.flatten().tolist() == pytest.approx([1 / 0.6] * 3)
    assert value(WeightedLoss(loss="lk_hybrid"), made(**A)) == pytest.approx(0.399348, abs=1e-6)
    hybrid = WeightedLoss(loss="lk_hybrid", eta=0)
    assert value(hybrid, made(**A)) == pytest.approx(0.396058, abs=1e-6), "share 1 is forward KL"
    share, example = math.exp(-1.8), made(**A)
    want = share * gradient(WeightedLoss(loss="forward_kl"), example)
    want = want + (1 - share) * gradient(WeightedLoss(loss="tv"), example)
    assert torch.allclose(gradient(WeightedLoss(loss="lk_hybrid"), example), want, atol=1e-9)


def test_the_share_of_the_hybrid_is_each_slot_s_own(made: Any) -> None:
    """Overlaps .2 and .9 with divergences 2 and .05: .777607; one share for both would give .560429."""

    class Known(View):
        def __init__(self) -> None:
            pass

        def ask(self, *requests: Any) -> tuple[Tensor, ...]:
            return torch.tensor([[[0.0, 2.0, 0.05]]]), torch.tensor([[[1.0, 0.2, 0.9]]])

    example = made(p=P64[:, :2], q=Q64[:, :2], labels=[0, 0])
    out = HeadOutput({"main": Known()})
    total = WeightedLoss(loss="lk_hybrid").numerator(out, example.layout, example.teacher, CTX)
    assert float(total) / 2 == pytest.approx(0.777607, abs=1e-6)


def test_limits(made: Any) -> None:
    """A certain target makes overlap and Renyi losses the cross entropy; a draft without hope is capped at 1e-5."""
    sure = torch.tensor([[[1.0, 1e-30, 1e-30]]]).double()
    half = torch.tensor([[[0.5, 0.3, 0.2]]]).double()
    for loss in ("nla", "renyi", "ce"):
        assert value(WeightedLoss(loss=loss), made(p=sure, q=half, labels=[0])) == pytest.approx(math.log(2))
    for loss in ("nla", "renyi", "lk_hybrid", "forward_kl", "jsd"):
        assert value(WeightedLoss(loss=loss), made(p=half, q=half, labels=[0])) == pytest.approx(0.0, abs=1e-12)
    far = made(p=sure, q=sure.flip(-1), labels=[0])
    assert value(WeightedLoss(loss="nla"), far) == pytest.approx(11.512925, abs=1e-6)
    assert gradient(WeightedLoss(loss="nla"), far).abs().max() == 0


def test_renyi_lies_below_both_divergences_and_bounds_total_variation(made: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(1, 40, 6, generator=generator, dtype=torch.float64).mul(2).softmax(-1) for _ in "pq")
    example = made(p=p, q=q, labels=[0] * 40)

    def numbers(loss: Any) -> Tensor:
        return WeightedLoss(loss=loss).per_slot(example.out, example.layout, example.teacher)[0, 0, 1:]

    renyi = numbers("renyi")
    assert (renyi <= torch.minimum(numbers("forward_kl"), numbers("reverse_kl")) + 1e-12).all() and renyi.min() > 0
    assert (numbers("tv") <= (1 - (-renyi).exp()).sqrt() + 1e-12).all()


# -- weights ----------------------------------------------------------------------------------------------------------

DECAY = (1, 0.866878, 0.751477, 0.651439, 0.564718)


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({"decay": 7}, DECAY),
        ({"weight": "auf"}, (1, 1, 1, 0, 0)),
        ({"weight": "auf", "decay": 7}, (*DECAY[:3], 0, 0)),
        ({"weight": "vat", "decay": 7}, (1, 1, 1, 0.866878, 0.751477)),
        ({"weight": "vat", "decay": -1 / math.log(0.8)}, (1, 1, 1, 0.8, 0.64)),
        ({"weight": "vat"}, (1, 1, 1, 1, 1)),
        ({"weight": "label", "alpha": 0.5}, (2.2892, 1.4892, 0.8892, 0.4992, 0.1872)),
        ({"weight": "label", "alpha": 0}, (1.0548, 0.4548, 0.1548, 0.0648, 0.0108)),
        ({"weight": "overlap", "alpha": 0.5}, (3.778773, 2.828773, 2.021273, 1.294523, 0.604111)),
        ({"weight": "overlap", "alpha": 0.3}, (3.368936, 2.438936, 1.704236, 1.072394, 0.484781)),
        ({"weight": "overlap", "alpha": 0}, (2.8278, 1.9278, 1.2978, 0.7938, 0.3402)),
        ({"weight": "target"}, (1, 0.7, 0.56, 0.28, 0.168)),
    ],
)
def test_weights_of_the_example(made: Any, settings: dict[str, Any], want: tuple[float, ...]) -> None:
    for labels in ("data", "target"):  # here the data holds what the target finds likeliest
        assert weights(WeightedLoss(labels=labels, **settings), made()) == pytest.approx(want, abs=1e-6)


def test_sums_of_the_example(made: Any) -> None:
    """ML A1, A2 and A4: what is divided by the five valid slots."""
    assert value(WeightedLoss(weight="auf"), made()) == pytest.approx(0.481589, abs=1e-6)
    assert value(WeightedLoss(weight="auf", normalize="blocks"), made()) == pytest.approx(2.407946, abs=1e-6)
    inside = WeightedLoss(weight="auf", decay=7)
    assert total_of(inside, made()) / sum(weights(inside, made())) == pytest.approx(0.770124, abs=1e-6)
    assert value(WeightedLoss(decay=7, normalize="weights"), made()) == pytest.approx(0.849680, abs=1e-6)
    d_pard = WeightedLoss(weight="overlap", alpha=0.5, loss="renyi")
    assert value(d_pard, made()) == pytest.approx(0.105333, abs=1e-6)
    for alpha, want in ((0.5, 2.168304), (0.3, 1.857600)):
        dpala = WeightedLoss(weight="overlap", alpha=alpha, loss="nla")
        assert total_of(dpala, made()) == pytest.approx(want, abs=1e-6)
    hole = made([1, 0, 1, 1, 1])
    assert weights(d_pard, hole) == pytest.approx((3.327969, 0, 2.377969, 1.522969, 0.710719), abs=1e-6)
    assert value(d_pard, hole) == pytest.approx(0.060519, abs=1e-6)


@pytest.mark.parametrize(
    ("valid", "want", "total", "slots"),
    [
        ([1, 0, 1, 1, 1], (1, 0, 1, 0, 0), 1.714798, 4),
        ([1, 1, 0, 1, 1], (1, 1, 0, 1, 1), 3.324236, 4),  # the failing slot is not counted: the next one fails
        ([1, 1, 1, 1, 0], (1, 1, 1, 0, 0), 2.407946, 4),
        ([0, 0, 0, 0, 0], (0, 0, 0, 0, 0), 0.0, 0),
    ],
)
def test_a_hole_is_never_a_failure(
    made: Any, valid: list[int], want: tuple[float, ...], total: float, slots: int
) -> None:
    """Whatever it holds: the draft there is wrong, and its law may be no number."""
    term, example = WeightedLoss(weight="auf"), made(valid)
    assert weights(term, example) == list(want)
    assert total_of(term, example) == pytest.approx(total, abs=1e-6)
    assert float(term.denominator(count_slots(example.layout))) == slots
    example.hidden.data[0, 0, 1:][~torch.tensor(valid).bool()] = math.nan
    assert total_of(term, example) == pytest.approx(total, abs=1e-6)
    assert gradient(term, example).isfinite().all()


@pytest.mark.parametrize(
    ("best", "want"),
    [
        (BEST, (1,) * 5),
        ([1, 1, 0, 2, 0], DECAY),
        ([0, 0, 1, 2, 0], (1, 1, *DECAY[1:4])),
    ],
)
def test_the_decay_starts_at_the_first_failure(made: Any, best: list[int], want: tuple[float, ...]) -> None:
    """All accepted, the first fails, the second and third fail. Labels of the data are not looked at."""
    q = torch.full((1, 5, 3), 0.2, dtype=torch.float64).scatter(2, torch.tensor([best])[..., None], 0.6)
    term = WeightedLoss(weight="vat", decay=7)
    assert weights(term, made(q=q, labels=[2, 2, 2, 2, 2])) == pytest.approx(want, abs=1e-6)


def test_helpers_by_hand() -> None:
    chances, yes = torch.tensor([0.9, 0.8, 0.85]), torch.ones(3).bool()
    assert suffix(torch.tensor([0.9, 0.8, 0.85]), yes).tolist() == pytest.approx([2.232, 1.332, 0.612])
    assert suffix(chances, torch.tensor([1, 0, 1]).bool()).tolist() == pytest.approx([1.665, 0, 0.765])
    ok = torch.tensor([[1, 0, 1], [1, 1, 1], [0, 1, 0]]).bool()
    assert first_failure(ok, torch.ones_like(ok)).flatten().tolist() == [1, 3, 0]
    assert first_failure(ok, torch.tensor([1, 0, 1]).bool().expand(3, 3)).flatten().tolist() == [3, 3, 0]


def test_what_the_target_would_not_write_silences_what_is_behind_it(made: Any) -> None:
    """PARD-2: the target's chances .9, .8, .5, .2 of the labels (the last unused), cross entropies .1, .4, .8, 1.5."""
    law = torch.tensor([0.9, 0.8, 0.5, 0.2]).double()
    draft = (-torch.tensor([0.1, 0.4, 0.8, 1.5]).double()).exp()
    tables = [torch.stack([x, 1 - x], -1)[None] for x in (law, draft)]
    term, example = WeightedLoss(weight="target"), made(p=tables[0], q=tables[1], labels=[0] * 4)
    assert weights(term, example) == pytest.approx((1, 0.9, 0.72, 0.36))
    assert total_of(term, example) / 2.98 == pytest.approx(0.528859, abs=1e-6)
    hole = made([1, 0, 1, 1], *tables, labels=[0] * 4)
    assert weights(term, hole) == pytest.approx((1, 0, 0.9, 0.45))


# -- gradients --------------------------------------------------------------------------------------------------------

EAL = {"loss": "ce", "weight": "label", "alpha": 0, "labels": "target"}
WTV = {"loss": "nla", "weight": "overlap", "alpha": 0}


def expected_length(made: Any, settings: dict[str, Any]) -> Tensor:
    """``sum_j prod_{i <= j}`` of q of the target's likeliest tokens, or of the overlaps."""
    valid, temperature = made.layout.valid[0, 0, 1:], settings.get("temperature", 1.0)
    q, p = made.hidden[0, 0, 1:], P64[0].log()
    q, p = (torch.softmax(x / temperature, -1) for x in (q, p))
    chances = q[range(5), BEST] if settings["loss"] == "ce" else torch.minimum(p, q).sum(-1)
    return (torch.where(valid, chances, 1.0).cumprod(0) * valid).sum()


@pytest.mark.parametrize("valid", [[1, 1, 1, 1, 1], [1, 0, 1, 1, 0]])
@pytest.mark.parametrize(
    "settings", [EAL, WTV, {**WTV, "temperature": 0.5}, {**WTV, "temperature": 2.0}, {**EAL, "temperature": 0.7}]
)
def test_without_smoothing_the_gradient_is_that_of_the_expected_length(
    made: Any, settings: dict[str, Any], valid: list[int]
) -> None:
    """By dense autograd and by differences; with smoothing it is not."""
    example = made(valid)
    (want,) = torch.autograd.grad(-expected_length(example, settings), example.hidden)
    found = gradient(WeightedLoss(**settings), example)
    assert torch.allclose(found, want[0, 0, 1:], atol=1e-10)
    logits, slopes = example.hidden.detach(), []
    for place in ((0, 0, 3, 0), (0, 0, 3, 2)):
        ends = []
        for sign in (1, -1):
            example.hidden = logits.clone()
            example.hidden[place] += sign * 1e-5
            ends.append(float(expected_length(example, settings)))
        slopes.append(-(ends[0] - ends[1]) / 2e-5)
    assert [float(found[2, 0]), float(found[2, 2])] == pytest.approx(slopes, abs=1e-8)
    smooth = gradient(WeightedLoss(**{**settings, "alpha": 0.5}), made(valid))
    assert not torch.allclose(smooth, found, atol=1e-2)


def test_worked_gradients(made: Any) -> None:
    eal = gradient(WeightedLoss(**EAL), made())
    assert eal[0].tolist() == pytest.approx((-0.421920, 0.316440, 0.105480), abs=1e-6)
    assert eal[2].tolist() == pytest.approx((-0.108360, 0.061920, 0.046440), abs=1e-6)
    wtv = gradient(WeightedLoss(**WTV), made())
    assert wtv[2].tolist() == pytest.approx((-0.340672, 0.194670, 0.146002), abs=1e-6)
    for temperature, want in ((1.0, 2.8278), (0.5, 2.345883), (2.0, 3.665323)):
        assert float(expected_length(made(), {**WTV, "temperature": temperature}).detach()) == pytest.approx(
            want, abs=1e-6
        )
        first = weights(WeightedLoss(**WTV, temperature=temperature), made())[0]
        assert first == pytest.approx(want, abs=1e-6), "the first slot's weight is the whole expected length"
    renyi = gradient(WeightedLoss(loss="renyi"), made())
    assert renyi[0].tolist() == pytest.approx((-0.052627, 0.053330, -0.000703), abs=1e-6)
    assert renyi[2].tolist() == pytest.approx((-0.095745, 0.046035, 0.049709), abs=1e-6)
    d_pard = WeightedLoss(weight="overlap", alpha=0.5, loss="renyi")
    assert gradient(d_pard, made())[0].tolist() == pytest.approx((-0.198867, 0.201522, -0.002655), abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({"decay": 7}, (0.193, 0.209, 0.254, 0.126, 0.218)),
        ({"weight": "auf"}, (0.25, 0.3125, 0.4375, 0, 0)),
        ({"weight": "label", "alpha": 0.5}, (0.348, 0.283, 0.236, 0.076, 0.057)),
        ({"weight": "overlap", "alpha": 0.5, "loss": "renyi"}, (0.199, 0.469, 0.191, 0.066, 0.075)),
    ],
)
def test_where_the_gradient_goes(made: Any, settings: dict[str, Any], shares: tuple[float, ...]) -> None:
    """Share of each slot in the L1 norm; weights pass none themselves, so differences with them held still agree."""
    term, example = WeightedLoss(**settings), made()
    found = gradient(term, example)
    sizes = found.abs().sum(-1)
    assert (sizes / sizes.sum()).tolist() == pytest.approx(shares, abs=6e-4)
    assert torch.allclose(found, differences(term, example), atol=1e-6)


# -- divisors ---------------------------------------------------------------------------------------------------------


class Given(SlotwiseLoss):
    """Weights and losses are what the test says."""

    name: ClassVar[str] = "given_of_test_weighted"

    def __init__(self, *, normalize: Any = "slots") -> None:
        super().__init__(decay=None, coefficient=1.0, view="main")
        self.normalize = normalize

    def per_slot(self, out: HeadOutput, layout: Any, teacher: Teacher | None) -> Tensor:
        return torch.tensor([[[9.0, 1.0, 2.0, 4.0], [9.0, 2.0, 2.0, 9.0], [9.0, 3.0, 9.0, 9.0], [9.0] * 4]])

    def weights(self, out: HeadOutput, layout: Any, teacher: Teacher | None) -> Tensor:
        return torch.tensor([[[9.0, 2.0, 1.0, 3.0], [9.0, 1.0, 0.5, 9.0], [9.0, 2.0, 9.0, 9.0], [9.0] * 4]])


@pytest.mark.parametrize(
    ("normalize", "want"),
    [("slots", 25 / 6), ("blocks", 25 / 3), ("documents", 12.5), ("document_mean", 7.75)],
)
def test_every_divisor_of_two_documents(table: Any, normalize: Any, want: float) -> None:
    """A document of two blocks with sums 16 and 3, one of one block with 6, and a padding block."""
    laws = torch.full((4, 3, 2), 0.5)
    valid = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
    example = table(laws, laws, torch.zeros(4, 3, dtype=torch.long), valid)
    layout = replace(
        example.layout,
        context_start=torch.tensor([[0, 0, 9, 0]]),
        keep=torch.tensor([[True, True, True, False]]),
    )
    counts = torch.tensor([3.0, 2.0, 1.0])
    totals = SlotTotals(counts, counts, torch.tensor(3.0), torch.tensor(2.0))
    term = Given(normalize=normalize)
    found = term.numerator(example.out, layout, None, CTX) / term.denominator(totals)
    assert float(found) == pytest.approx(want)
    names = [field.name for field in fields(layout) if field.name not in ("rows", "streams", "predicting")]
    both = replace(layout, **{name: torch.cat([getattr(layout, name)] * 2) for name in names})
    counts = blocks_of_document(both, both.valid.any(-1))
    assert counts[:, :3].tolist() == [[2.0, 2.0, 1.0]] * 2, "blocks of another row are another document's"


# -- verification-aware training: three pieces ------------------------------------------------------------------------


def test_verification_aware_training_of_the_example(made: Any) -> None:
    """Hard 4.060225 and soft 4.576306 over five slots, and the survival head's .351124: 2.078430."""
    example = made()
    hard, soft = (
        total_of(WeightedLoss(loss=loss, weight="vat", decay=7, labels="target"), example) for loss in ("ce", "soft_ce")
    )
    assert (hard, soft) == pytest.approx((4.060225, 4.576306), abs=1e-6)
    guess = torch.tensor([[[0.5, 0.9, 0.8, 0.5, 0.4, 0.2]]], requires_grad=True)
    out = HeadOutput(example.out.views, {"confidence": guess})
    term = ConfidenceLoss(label="survival")
    survival = term.numerator(out, example.layout, example.teacher, CTX) / term.denominator(
        count_slots(example.layout, 5)
    )
    assert float(survival) == pytest.approx(0.351124, abs=1e-6)
    assert (hard + soft) / 5 + float(survival) == pytest.approx(2.078430, abs=1e-6)
    survival.backward()
    assert torch.equal(guess.grad.sign(), torch.tensor([[[0.0, -1, -1, 1, 1, 1]]])) and example.hidden.grad is None


def test_survival_is_of_the_whole_draft_up_to_the_slot_and_skips_holes(made: Any) -> None:
    """Slot 4 is right again behind the failure at 3: it did not survive. With slot 3 not counted it did."""
    for valid, lived in ([1, 1, 1, 1, 1], [1, 1, 0, 0, 0]), ([1, 1, 0, 1, 1], [1, 1, 0, 1, 0]):
        example = made(valid)
        guess = torch.full((1, 1, 6), 0.5, requires_grad=True)
        out = HeadOutput(example.out.views, {"confidence": guess})
        ConfidenceLoss(label="survival").numerator(out, example.layout, example.teacher, CTX).backward()
        sign = torch.tensor([0, *(v * (1 - 2 * alive) for v, alive in zip(valid, lived, strict=True))])
        assert torch.equal(guess.grad[0, 0].sign(), sign.float())


# -- a reduced vocabulary, settings, and what the terms ask for --------------------------------------------------------


def test_a_reduced_vocabulary_compares_tokens_and_overlaps_with_the_whole_law(made: Any) -> None:
    """Tokens 1 and 2 of three are kept: column 0 is token 1. The target's token 0 is then always a failure."""
    lm = LanguageHead(torch.eye(3, dtype=torch.float64)).restrict(torch.tensor([1, 2]))
    example = made(labels=[1, 1, 1, 2, 1])
    example.teacher.lm = LanguageHead(torch.eye(3, dtype=torch.float64))
    out = HeadOutput({"main": View.of(example.hidden, example.layout.rows, lm)})

    def found(**settings: Any) -> list[float]:
        return WeightedLoss(**settings).weights(out, example.layout, example.teacher)[0, 0, 1:].tolist()

    assert found(weight="auf") == [1] * 5  # every best token of the draft's two is the label
    assert found(weight="vat", decay=7) == pytest.approx(DECAY)  # the first slot's best of the target is token 0
    within = Q64[0, :, 1:] / Q64[0, :, 1:].sum(-1, keepdim=True)
    overlaps = torch.minimum(P64[0, :, 1:], within).sum(-1)
    assert found(weight="overlap", alpha=0)[-1] == pytest.approx(float(overlaps.prod()))


@pytest.mark.parametrize(
    ("settings", "last_hidden", "laws"),
    [
        ({}, False, ()),
        ({"weight": "label", "alpha": 0.5}, False, ()),
        ({"weight": "auf"}, False, ()),
        ({"labels": "target"}, True, ()),
        ({"weight": "vat"}, True, ()),
        ({"weight": "target"}, True, (1.0,)),
        ({"weight": "overlap", "alpha": 0.5, "temperature": 0.5}, True, (0.5,)),
        ({"loss": "nla"}, True, (1.0,)),
    ],
)
def test_what_is_asked_of_the_target(settings: dict[str, Any], last_hidden: bool, laws: tuple[float, ...]) -> None:
    term = WeightedLoss(**settings)
    assert term.required() == FeatureSpec(last_hidden=last_hidden) and term.laws() == laws
    again = LossTerm.from_settings(term.name, term.settings())
    assert again.settings() == term.settings() and type(again) is WeightedLoss


def test_old_terms_are_settings_of_the_family(made: Any) -> None:
    """The same number, bit for bit, and the same gradient."""
    pairs = [
        (CrossEntropy(decay=7), WeightedLoss(decay=7, normalize="weights")),
        (CrossEntropy(prefix=True), WeightedLoss(prefix=True, normalize="weights")),
        (CrossEntropy(labels="target"), WeightedLoss(labels="target", normalize="weights")),
        (DPace(alpha=0.25), WeightedLoss(weight="label", alpha=0.25)),
    ]
    for old, new in pairs:
        assert value(old, made([1, 0, 1, 1, 1])) == value(new, made([1, 0, 1, 1, 1]))
        assert torch.equal(gradient(old, made([1, 0, 1, 1, 1])), gradient(new, made([1, 0, 1, 1, 1])))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": "focal"}, r"loss\.loss: 'focal' is unknown. Use one of \['ce', 'soft_ce'"),
        ({"weight": "early"}, r"loss\.weight: 'early' is unknown. Use one of \['decay', 'label'"),
        ({"weight": "label"}, r"loss\.alpha: None is not a share. Use 0\.\.1"),
        ({"weight": "overlap", "alpha": 1.5}, r"loss\.alpha: 1\.5 is not a share"),
        ({"alpha": 0.5}, r"loss\.alpha: weight 'decay' smooths nothing. Use null"),
        ({"weight": "label", "alpha": 0.5, "decay": 7}, r"loss\.decay: weight 'label' says itself .* weight=decay"),
        ({"weight": "auf", "normalize": "weights"}, r"loss\.normalize: the sum of weight 'auf' is not known before"),
        ({"normalize": "batch"}, r"loss\.normalize: 'batch' is unknown. Use one of \['weights', 'slots'"),
        ({"eta": -1}, r"loss\.eta: -1 would favour KL"),
        ({"labels": "samples"}, r"loss\.labels: 'samples' is unknown"),
        ({"temperature": 0}, r"loss\.temperature: 0 gives no law"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeCheckError)) as caught:  # the shape hook, where it is on, knows allowed words
        WeightedLoss(**settings)
    assert isinstance(caught.value, TypeCheckError) or re.match(words, str(caught.value))


# -- the recipes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "want"),
    [
        ("auf", {"auf": 0.481589}),
        ("vat", {"vat": 4.060225 / 5, "vat_soft": 4.576306 / 5}),
        ("d_pard", {"d_pard": 0.526667}),  # one block, one document
        ("dpala", {"dpala": 1.857600 / 5}),
        ("lk_alpha", {"lk_alpha": 0.212110}),
        ("pard2", {"pard2": 0.1 * 2.083671 / 5, "pard2_kl": 0.254248 / 5}),
    ],
)
def test_a_recipe_has_the_terms_of_its_worked_example(made: Any, recipe: str, want: dict[str, float]) -> None:
    """Coefficient times share on the example, with decay 7; hand sums of its table where no sheet has the number."""
    stated = OmegaConf.to_container(load_recipe(recipe, ["target=qwen3_8b"]).loss, resolve=True)
    terms = {name: make(node) for name, node in stated.items() if name in want}
    found = {name: term.coefficient * value(term, made()) for name, term in terms.items()}
    assert found == pytest.approx(want, abs=1e-6)
