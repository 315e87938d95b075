"""Losses of a whole block against enumerations: what verification accepts, and what a weight is worth."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from dflash_lightning.block import count_slots
from dflash_lightning.loss import BlockVerificationLoss, DPace, LossTerm
from dflash_lightning.loss.base import unbroken
from dflash_lightning.loss.expected_length import Part, power_mean
from dflash_lightning.loss.weights import reach, suffix
from dflash_lightning.types import SlotTotals, StepContext

CTX = StepContext(0, 10, 0)
Law = Callable[[tuple[int, ...]], list[float]]


# -- what block verification accepts, by its definition ---------------------------------------------------------------


def accepted_by_block_verification(p: Law, q: Law, drafts: int, size: int) -> float:
    """Expected accepted drafts, over every drafted path and every choice of the verifier (arXiv 2403.10444).

    Path X is drawn from q. With w_i = min(1, w_{i-1} p(X_i) / q(X_i)), draft i < n is accepted with chance h_i, where
    S = sum_x max(w_i p(x | X_1..i) - q(x | X_1..i), 0) and h_i = S / (S + 1 - w_i), and h_n = w_n; the longest
    accepted prefix stands.
    """
    expected = 0.0
    for path in itertools.product(range(size), repeat=drafts):
        chance, weight, accepts = 1.0, 1.0, []
        for i, token in enumerate(path):
            drawn = q(path[:i])[token]
            chance, weight = chance * drawn, min(1.0, weight * p(path[:i])[token] / drawn)
            before = path[: i + 1]
            if i + 1 == drafts:
                accepts.append(weight)
            else:
                left = sum(max(weight * a - b, 0.0) for a, b in zip(p(before), q(before), strict=True))
                accepts.append(0.0 if left == 0 else left / (left + 1.0 - weight))
        none_longer = 1.0
        for i in range(drafts, 0, -1):
            expected += chance * none_longer * accepts[i - 1] * i
            none_longer *= 1.0 - accepts[i - 1]
    return expected


FIRST = [0.6, 0.3, 0.1]
AFTER = {0: [0.5, 0.3, 0.2], 1: [0.1, 0.6, 0.3], 2: [0.3, 0.3, 0.4]}
FLAT = [[0.5, 0.2, 0.3], [0.4, 0.4, 0.2], [0.25, 0.5, 0.25]]
MARKOV = {0: [0.4, 0.3, 0.3], 1: [0.2, 0.5, 0.3], 2: [0.3, 0.2, 0.5]}


def target(path: tuple[int, ...]) -> list[float]:
    return AFTER[path[-1]] if path else FIRST


def flat(path: tuple[int, ...]) -> list[float]:
    return FLAT[len(path)]


def markov(path: tuple[int, ...]) -> list[float]:
    return MARKOV[path[-1]] if path else FLAT[0]


def all_paths(table: Any, p: Law, q: Law, drafts: int, size: int) -> tuple[Any, Tensor]:
    """A block for every path of labels, and how likely the target draws each."""
    paths = list(itertools.product(range(size), repeat=drafts))
    laws = [[[law(path[:i]) for i in range(drafts)] for path in paths] for law in (q, p)]
    made = table(*(torch.tensor(law, dtype=torch.float64) for law in laws), torch.tensor(paths))
    chances = [math.prod(p(path[:i])[token] for i, token in enumerate(path)) for path in paths]
    return made, torch.tensor(chances, dtype=torch.float64)


def scores_of(made: Any, loss: BlockVerificationLoss | None = None) -> Tensor:
    loss = BlockVerificationLoss() if loss is None else loss
    return loss.scores(made.out, made.layout, made.teacher, unbroken(made.layout))[0, :, 1:]


@pytest.mark.parametrize(("q", "block"), [(flat, 2.089), (markov, 2.209)])
def test_the_expected_score_is_what_block_verification_accepts(table: Any, q: Law, block: float) -> None:
    """Example B of three symbols and three drafts, over all 27 paths of labels and all 27 of drafts."""
    made, chances = all_paths(table, target, q, 3, 3)
    assert chances.sum().item() == pytest.approx(1.0)
    expected = (chances[:, None] * scores_of(made)).sum(0)
    assert expected.sum().item() == pytest.approx(block, abs=1e-9)
    assert accepted_by_block_verification(target, q, 3, 3) == pytest.approx(block, abs=1e-9)
    if q is flat:
        assert expected.tolist() == pytest.approx([0.8, 0.69, 0.599], abs=1e-9)


def test_the_textbook_case_of_two_symbols(table: Any) -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 11/9, where token verification accepts 10/9."""
    made, chances = all_paths(table, lambda _: [1 / 3, 2 / 3], lambda _: [2 / 3, 1 / 3], 2, 2)
    assert (chances[:, None] * scores_of(made)).sum().item() == pytest.approx(11 / 9, abs=1e-12)


def test_random_laws_that_depend_on_the_whole_path(table: Any) -> None:
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        drawn: dict[tuple[str, tuple[int, ...]], list[float]] = {}

        def law(name: str, path: tuple[int, ...], generator: Any = generator, drawn: Any = drawn) -> list[float]:
            fresh = torch.rand(2, generator=generator, dtype=torch.float64) + 0.05
            return drawn.setdefault((name, path), (fresh / fresh.sum()).tolist())

        p, q = (lambda path, name=name: law(name, path) for name in "pq")
        made, chances = all_paths(table, p, q, 3, 2)
        expected = (chances[:, None] * scores_of(made)).sum().item()
        assert expected == pytest.approx(accepted_by_block_verification(p, q, 3, 2), abs=1e-12)


def one_path(table: Any, path: tuple[int, ...], valid: list[int] | None = None) -> Any:
    laws = [torch.tensor([[law(path[:i]) for i in range(3)]], dtype=torch.float64) for law in (flat, target)]
    return table(*laws, torch.tensor([path]), None if valid is None else torch.tensor([valid]).bool())


@pytest.mark.parametrize(
    ("path", "scores", "losses"),
    [
        ((0, 1, 2), (0.8, 0.75, 0.833333), (0.231049, 0.230580, 0.230112)),
        ((1, 1, 0), (0.8, 0.466667, 0.377778), (0.652911, None, 0.601210)),
        ((0, 0, 0), (0.8, 0.75, 0.5), (None, None, None)),
    ],
)
def test_scores_and_losses_of_single_paths(
    table: Any, path: tuple[int, ...], scores: tuple[float, ...], losses: tuple[float | None, ...]
) -> None:
    """With beta 0, 1/2 and 1: at steps 0, 5 and 10 of 10."""
    made = one_path(table, path)
    assert scores_of(made)[0].tolist() == pytest.approx(scores, abs=1e-6)
    loss = BlockVerificationLoss()
    for step, want in zip((0, 5, 10), losses, strict=True):
        value = loss.numerator(made.out, made.layout, made.teacher, StepContext(step, 10, 0))
        assert want is None or value.item() == pytest.approx(want, abs=1e-6)


def test_gradients_flow_through_the_ratios_and_their_running_minimum(table: Any) -> None:
    """Worked numbers, and once more against differences of the loss itself."""
    made, loss = one_path(table, (0, 1, 2)), BlockVerificationLoss(anneal=0)
    (gradient,) = torch.autograd.grad(loss.numerator(made.out, made.layout, made.teacher, CTX), made.hidden)
    want = [[-0.395105, 0.107692, 0.287413], [-0.055944, 0.083916, -0.027972], [0.0, 0.0, 0.0]]
    assert torch.allclose(gradient[0, 0, 1:], torch.tensor(want).double(), atol=1e-6)
    assert gradient[0, 0, 0].abs().max() == 0
    made = table(*(torch.rand(2, 3, 4, dtype=torch.float64).softmax(-1) for _ in "qp"), torch.randint(0, 4, (2, 3)))

    def value(hidden: Tensor) -> Tensor:
        made.hidden = hidden
        return loss.numerator(made.out, made.layout, made.teacher, CTX)

    assert torch.autograd.gradcheck(value, made.hidden)


def test_only_the_unbroken_run_at_the_start_of_a_block_counts(table: Any) -> None:
    """After a hole nobody knows whether the path is the target's; blocks are counted by their first slot."""
    whole = one_path(table, (0, 1, 2))
    losses = []
    for valid in ([1, 1, 1], [1, 0, 1], [1, 0, 0], [0, 1, 1], [0, 0, 0]):
        made, loss = one_path(table, (0, 1, 2), valid), BlockVerificationLoss()
        value = loss.numerator(made.out, made.layout, made.teacher, CTX)
        (gradient,) = torch.autograd.grad(value, made.hidden)
        assert gradient.isfinite().all() and loss.denominator(count_slots(made.layout)).item() == valid[0]
        losses.append(value.item())
    assert losses[1] == losses[2] == pytest.approx(-scores_of(whole)[0, 0].log().item())
    assert losses[3] == losses[4] == 0 and losses[0] != losses[1]


def test_equal_laws_are_accepted_whole_and_impossible_drafts_stay_finite(table: Any) -> None:
    p = torch.tensor([[target(()), target((0,)), target((1,))]], dtype=torch.float64)
    made = table(p, p, torch.tensor([[0, 1, 2]]))
    assert scores_of(made)[0].tolist() == pytest.approx([1.0] * 3)
    far = torch.tensor([[[1e-30, 1.0], [1.0, 1e-30], [0.5, 0.5]]])
    made = table(far.flip(-1), far, torch.tensor([[0, 1, 0]]))
    value = BlockVerificationLoss(anneal=0).numerator(made.out, made.layout, made.teacher, CTX)
    (gradient,) = torch.autograd.grad(value, made.hidden)
    assert value.isfinite() and gradient.isfinite().all()


def test_temperature_is_that_of_both_laws(table: Any) -> None:
    """At T the laws are p^(1/T) and q^(1/T), normalised: the same as tables of those at T = 1."""
    warm = one_path(table, (1, 1, 0))
    cool = [(law.double() ** 2 / (law**2).sum(-1, keepdim=True)) for law in _tables((1, 1, 0))]
    want = scores_of(table(*cool, torch.tensor([[1, 1, 0]])))
    assert torch.allclose(scores_of(warm, BlockVerificationLoss(temperature=0.5)), want, atol=1e-12)


def _tables(path: tuple[int, ...]) -> list[Tensor]:
    return [torch.tensor([[law(path[:i]) for i in range(3)]], dtype=torch.float64) for law in (flat, target)]


def test_the_power_mean_goes_from_the_mean_of_logs_to_the_log_of_the_mean() -> None:
    logs = torch.tensor([[-1.0, -3.0, -9.0]]).double()
    counted = torch.tensor([[True, True, False]])
    assert power_mean(logs, counted, 0.0).item() == -2.0
    assert power_mean(logs, counted, 1e-3).item() == pytest.approx(-2.0, abs=1e-3)
    assert power_mean(logs, counted, 1.0).item() == pytest.approx(math.log((math.exp(-1) + math.exp(-3)) / 2))
    loss = BlockVerificationLoss(anneal=0.5)
    assert [loss.beta(StepContext(step, 100, 0)) for step in (0, 25, 50, 99)] == [0.0, 0.5, 1.0, 1.0]
    assert BlockVerificationLoss(anneal=0).beta(StepContext(0, 100, 0)) == 1.0


# -- the worth of a slot ----------------------------------------------------------------------------------------------

PROBS = torch.tensor([0.9, 0.8, 0.5, 0.2]).double()


@pytest.mark.parametrize(
    ("alpha", "valid", "weights"),
    [
        (0.5, [1, 1, 1, 1], (2.831, 1.881, 1.026, 0.38475)),
        (0.0, [1, 1, 1, 1], (2.052, 1.152, 0.432, 0.072)),
        (1.0, [1, 1, 1, 1], (4, 3, 2, 1)),
        (0.5, [1, 1, 0, 0], (1.805, 0.855, 0, 0)),
        (0.5, [1, 0, 1, 1], (2.09, 0, 1.14, 0.4275)),
    ],
)
def test_weights_are_the_published_ones_and_a_mask_never_inflates_them(
    alpha: float, valid: list[int], weights: tuple[float, ...]
) -> None:
    found = suffix((1 - alpha) * PROBS + alpha, torch.tensor(valid).bool())
    assert found.tolist() == pytest.approx(weights, abs=6e-4)


def test_its_two_factors_alone(table: Any) -> None:
    """MT 6.1: how likely a slot is reached, and what it opens; their product is the whole weight, with holes too."""
    assert reach(0.5 * PROBS + 0.5, torch.ones(4).bool()).tolist() == pytest.approx((0.95, 0.855, 0.64125, 0.38475))
    for valid in ([1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]):
        made = paced(table, [valid])
        found = {
            part: DPace(part=part).weights(made.out, made.layout, None)[0, 0, 1:] * made.layout.valid[0, 0, 1:]
            for part in get_args(Part)
        }
        assert torch.allclose(found["reach"] * found["continuation"], found["both"], atol=1e-9)
        if all(valid):
            assert found["continuation"].tolist() == pytest.approx((2.98, 2.2, 1.6, 1.0))


def test_without_smoothing_the_weight_is_the_derivative_of_the_expected_length() -> None:
    logs = PROBS.log().requires_grad_()
    length = logs.exp().cumprod(0).sum()
    (derivative,) = torch.autograd.grad(length, logs)
    assert torch.allclose(derivative, suffix(PROBS, torch.ones(4).bool()), atol=1e-12)


def paced(table: Any, valid: list[list[int]]) -> Any:
    q = torch.stack([PROBS, 1 - PROBS], -1).expand(len(valid), 4, 2)
    return table(q, q, torch.zeros(len(valid), 4, dtype=torch.long), torch.tensor(valid).bool())


@pytest.mark.parametrize(("normalize", "want"), [("slots", 0.512102), ("documents", 2.048409)])
def test_both_normalisers_give_their_published_value(table: Any, normalize: Any, want: float) -> None:
    made, loss = paced(table, [[1, 1, 1, 1]]), DPace(normalize=normalize)
    value = loss.numerator(made.out, made.layout, None, CTX) / loss.denominator(count_slots(made.layout))
    assert value.item() == pytest.approx(want, abs=1e-6)
    many = paced(table, [[1, 1, 1, 1]] * 8)
    eight = loss.numerator(many.out, many.layout, None, CTX) / loss.denominator(count_slots(many.layout))
    assert eight.item() == pytest.approx(want * (8 if normalize == "documents" else 1), abs=1e-5)


def test_weights_carry_no_gradient_and_invalid_slots_none_at_all(table: Any) -> None:
    made = paced(table, [[1, 0, 1, 1]])
    (gradient,) = torch.autograd.grad(DPace().numerator(made.out, made.layout, None, CTX), made.hidden)
    weights = suffix(0.5 * PROBS + 0.5, torch.tensor([1, 0, 1, 1]).bool())
    assert torch.allclose(gradient[0, 0, 1:, 0], weights * (PROBS - 1), atol=1e-9)
    assert gradient[0, 0, [0, 2]].abs().max() == 0


def test_settings_make_equal_terms_and_bad_ones_are_refused() -> None:
    for loss in (
        DPace(alpha=0.25, part="reach"),
        DPace(normalize="documents"),
        BlockVerificationLoss(temperature=0.7, anneal=0.5),
    ):
        again = LossTerm.from_settings(loss.name, loss.settings())
        assert type(again) is type(loss) and again.settings() == loss.settings()
    assert BlockVerificationLoss().labels == "samples" and DPace().labels == "data"
    for make, words in (
        (lambda: DPace(alpha=2), r"loss\.alpha: 2 is not a share"),
        (lambda: DPace(part="rest"), r"loss\.part: 'rest' is unknown"),
        (lambda: DPace(normalize="weights"), r"loss\.normalize: the sum of weight 'label' is not known"),
        (lambda: BlockVerificationLoss(anneal=-1), r"loss\.anneal: -1 is not a share of the training"),
        (lambda: BlockVerificationLoss(temperature=0), r"loss\.temperature: 0 gives no law"),
    ):
        with pytest.raises((ValueError, TypeCheckError)) as caught:  # the shape hook, where it is on, knows words
            make()
        assert isinstance(caught.value, TypeCheckError) or re.match(words, str(caught.value))
    assert DPace().denominator(SlotTotals.zeros(3)) == 0
