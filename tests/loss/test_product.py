"""Products of chances of acceptance: worked numbers, their gradients, holes, and what the estimate is worth."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from dflash_lightning.block import count_slots
from dflash_lightning.loss import LossTerm, ProductLoss, WeightedLoss
from dflash_lightning.recipe import load_recipe
from dflash_lightning.recipe.make import make
from dflash_lightning.types import StepContext

CTX = StepContext(0, 1, 0)
Make = Callable[..., Any]


def with_overlaps(table: Make, *blocks: list[float], valid: list[list[int]] | None = None) -> Any:
    """Blocks of two tokens whose draft laws and target laws overlap by the given numbers: p is certain of token 0."""
    a = torch.tensor(blocks, dtype=torch.float64)
    q = torch.stack([a, 1.0 - a], dim=-1)
    p = torch.tensor([1.0, 1e-30], dtype=torch.float64).expand_as(q)
    return table(q, p, torch.zeros(a.shape, dtype=torch.long), None if valid is None else torch.tensor(valid).bool())


def value(term: LossTerm, made: Any) -> float:
    found = term.numerator(made.out, made.layout, made.teacher, CTX)
    return float(found.detach() / term.denominator(count_slots(made.layout)))


def gradient(term: LossTerm, made: Any) -> Tensor:
    found = term.numerator(made.out, made.layout, made.teacher, CTX)
    return torch.autograd.grad(found, made.hidden)[0][0, :, 1:]


ALPHA = [0.9, 0.8, 0.5]


@pytest.mark.parametrize(
    ("valid", "prefix", "want"),
    [
        ([1, 1, 1], False, 0.34),
        ([1, 1, 0], False, 0.19),
        ([1, 0, 1], False, 0.325),  # as AngelSpec's code has it: (.9 + .9 * .5) / 2
        ([1, 0, 1], True, 0.10),
    ],
)
def test_end_to_end_total_variation_of_the_worked_example(
    table: Make, valid: list[int], prefix: bool, want: float
) -> None:
    """MT 6.6 and 0.3."""
    assert value(ProductLoss(prefix=prefix), with_overlaps(table, ALPHA, valid=[valid])) == pytest.approx(
        want, abs=1e-6
    )


def test_the_sum_is_the_number_of_drafts_less_those_expected_to_stand(table: Make) -> None:
    """E = .9 + .72 + .36 = 1.98 of three; blocks are averaged, and one without a label counts for nothing."""
    assert value(ProductLoss(average=False), with_overlaps(table, ALPHA)) == pytest.approx(3 - 1.98, abs=1e-6)
    two = with_overlaps(table, ALPHA, [0.5, 0.5, 0.5], ALPHA, valid=[[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    assert value(ProductLoss(average=False), two) == pytest.approx((1.02 + 0.5) / 2, abs=1e-6)
    assert value(ProductLoss(), two) == pytest.approx((0.34 + 0.5) / 2, abs=1e-6)


P = [[0.6, 0.3, 0.1], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]]
AFTER = {0: [0.5, 0.3, 0.2], 1: [0.1, 0.6, 0.3], 2: [0.3, 0.3, 0.4]}
Q = [[0.5, 0.2, 0.3], [0.4, 0.4, 0.2], [0.25, 0.5, 0.25]]


def example_b(table: Make, *texts: tuple[int, ...]) -> Any:
    """MT 6.5 f: the target is a chain over three tokens, the drafter has a law per slot; a block per text."""
    p = [[P[0], AFTER[text[0]], AFTER[text[1]]] for text in texts]
    q = torch.tensor([Q] * len(texts), dtype=torch.float64)
    return table(q, torch.tensor(p, dtype=torch.float64), torch.tensor(texts))


def test_the_path_of_example_b(table: Make) -> None:
    """Overlaps .8, .9, .85 along 0, 1, 2: .289333; total variation .15 and LK-alpha .163674 beside it."""
    made = example_b(table, (0, 1, 2))
    assert value(ProductLoss(), made) == pytest.approx(0.289333, abs=1e-6)
    assert value(WeightedLoss(loss="tv"), made) == pytest.approx(0.15, abs=1e-6)
    assert value(WeightedLoss(loss="nla"), made) == pytest.approx(0.163674, abs=1e-6)


def test_it_estimates_the_length_that_rejection_accepts_with_a_bias(table: Make) -> None:
    """Over all 27 texts as the target draws them: 1.99508, where rejection accepts 2.0065 (MT 6.6)."""
    texts = list(itertools.product(range(3), repeat=3))
    chances = torch.tensor([P[0][a] * AFTER[a][b] * AFTER[b][c] for a, b, c in texts], dtype=torch.float64)
    lengths = [3 - value(ProductLoss(average=False), example_b(table, text)) for text in texts]
    assert float((chances * torch.tensor(lengths, dtype=torch.float64)).sum()) == pytest.approx(1.99508, abs=1e-5)
    exact = 0.0
    for chance, (a, b, c) in zip(chances.tolist(), texts, strict=True):
        ratios = [q[x] / p[x] for q, p, x in zip(Q, (P[0], AFTER[a], AFTER[b]), (a, b, c), strict=True)]
        exact += chance * sum(math.prod(min(1.0, r) for r in ratios[: k + 1]) for k in range(3))
    assert exact == pytest.approx(2.0065, abs=1e-6)


@pytest.mark.parametrize("settings", [{}, {"average": False}, {"floor": 0.3}, {"average": False, "floor": 0.9}])
def test_gradients_are_those_of_differences(table: Make, settings: dict[str, Any]) -> None:
    """At laws that tie nowhere: an overlap has a kink where p and q are equal."""
    term, step = ProductLoss(**settings), 1e-6
    made = example_b(table, (0, 1, 2), (1, 1, 0))
    made.hidden = (made.hidden + 0.07 * torch.arange(3)).detach().requires_grad_()
    found, logits = gradient(term, made), made.hidden.detach()
    for place in [(0, 0, 1, 0), (0, 0, 2, 1), (0, 1, 3, 2), (0, 1, 1, 1)]:
        ends = []
        for sign in (1, -1):
            made.hidden = logits.clone()
            made.hidden[place] += sign * step
            ends.append(value(term, made))
        made.hidden = logits.clone().requires_grad_()
        block, slot, token = place[1], place[2] - 1, place[3]
        assert float(found[block, slot, token]) / 2 == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-6)


def test_without_floor_its_gradient_is_that_of_the_window_total_variation(table: Make) -> None:
    """Of the sum; the weights of that loss are the rest of the product. The mean differs by the number of slots."""
    made = example_b(table, (0, 1, 2), (1, 1, 0))
    window = gradient(WeightedLoss(loss="nla", weight="overlap", alpha=0), made)
    torch.testing.assert_close(gradient(ProductLoss(average=False), made), window)
    torch.testing.assert_close(gradient(ProductLoss(), made) * 3, window)


def test_a_floor_lets_late_slots_learn_where_early_ones_fail(table: Make) -> None:
    """r = a1, max(a1, .1) a2, max(a1 a2, .1) a3; the last slot's gradient no longer falls with the product."""
    small = with_overlaps(table, [0.01, 0.5, 0.4])
    floored = ProductLoss(average=False, floor=0.1)
    assert value(floored, small) == pytest.approx(3 - (0.01 + 0.1 * 0.5 + 0.1 * 0.4), abs=1e-6)
    assert value(ProductLoss(average=False), small) == pytest.approx(3 - (0.01 + 0.005 + 0.002), abs=1e-6)
    plain, lifted = (gradient(term, small)[0, 2].abs().max() for term in (ProductLoss(average=False), floored))
    assert float(lifted / plain) == pytest.approx(0.1 / 0.005, rel=1e-4)
    high = with_overlaps(table, ALPHA)
    assert value(floored, high) == pytest.approx(value(ProductLoss(average=False), high)), "nothing is below it"


def test_what_is_not_valid_may_hold_anything(table: Make) -> None:
    made = with_overlaps(table, ALPHA, valid=[[1, 0, 1]])
    made.hidden.data[0, 0, 2] = math.nan
    assert value(ProductLoss(), made) == pytest.approx(0.325, abs=1e-6)
    found = gradient(ProductLoss(), made)
    assert bool(found.isfinite().all()) and not bool(found[0, 1].any())
    zero = with_overlaps(table, [0.9, 1e-40, 0.5])
    assert bool(gradient(ProductLoss(), zero).isfinite().all())


def test_the_recipes_options_are_these_losses() -> None:
    stated = {name: load_recipe("dflash", [f"loss={name}"]).loss[name] for name in ("e2e_tv", "dblast")}
    terms = {name: make(OmegaConf.to_container(node)) for name, node in stated.items()}
    assert (terms["e2e_tv"].average, terms["e2e_tv"].floor, terms["e2e_tv"].temperature) == (True, 0.0, 1.0)
    assert (terms["dblast"].average, terms["dblast"].floor) == (False, 0.1)
    with pytest.raises(ValueError, match=r"loss\.floor: 1 is no chance"):
        ProductLoss(floor=1)
