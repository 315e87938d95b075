"""Capped reverse KL, the length of a block, and new slots that weigh more: worked numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_lightning.block import count_slots
from dflash_lightning.loss import ClippedReverseKL, CrossEntropy, LengthLoss, SteppedCrossEntropy
from dflash_lightning.loss.weighted import WeightedLoss
from dflash_lightning.ops.lm_head import HeadOutput
from dflash_lightning.testing import check_loss
from dflash_lightning.types import SlotTotals, StepContext

CTX = StepContext(0, 1, 0)


def value_of(loss: Any, made: Any) -> float:
    numerator = loss.numerator(made.out, made.layout, made.teacher, CTX)
    return (numerator / loss.denominator(count_slots(made.layout))).item()


def test_the_mixture_on_one_slot(table: Any) -> None:
    """MT 6.7 A: p = (.6, .3, .1), q = (.2, .5, .3): .8 * 1.609438 + .2 KL(q, p) = 1.360605."""
    p, q = (torch.tensor([[law]], dtype=torch.float64) for law in ([0.6, 0.3, 0.1], [0.2, 0.5, 0.3]))
    made = table(q, p, torch.tensor([[2]]))
    hard, soft = value_of(CrossEntropy(labels="target"), made), value_of(ClippedReverseKL(), made)
    assert 0.8 * hard + 0.2 * soft == pytest.approx(1.360605, abs=1e-6)


@pytest.mark.parametrize(
    ("clip", "per_batch", "expected", "loss"),
    [(None, False, 0.744630, 0.739841), (0.01, True, 0.026184, 0.596151), (0.5, False, 0.314126, None)],
)
def test_caps_of_a_slot_and_of_the_batch(
    table: Any,
    monkeypatch: pytest.MonkeyPatch,
    clip: float | None,
    per_batch: bool,
    expected: float,
    loss: float | None,
) -> None:
    """MT 6.7: three drafts that lose (.1, .4, 2) by reverse KL and (.2, .7, 1.5) by cross entropy; decay 7."""
    law = torch.full((1, 3, 4), 0.25)
    made = table(law, law, torch.zeros(1, 3, dtype=torch.long))
    numbers = torch.tensor([[[0.0, 0.1, 0.4, 2.0]]], requires_grad=True)
    monkeypatch.setattr(WeightedLoss, "per_slot", lambda *arguments: numbers)
    term = ClippedReverseKL(clip=clip, per_batch=per_batch, decay=7.0)
    assert float(term.denominator(count_slots(made.layout))) == pytest.approx(2.618355, abs=1e-6)
    found = value_of(term, made)
    assert found == pytest.approx(expected, abs=2e-6)
    weights = torch.exp(-torch.arange(3) / 7.0)
    hard = float((weights * torch.tensor([0.2, 0.7, 1.5])).sum() / weights.sum())
    assert hard == pytest.approx(0.738643, abs=1e-6)
    assert loss is None or 0.8 * hard + 0.2 * found == pytest.approx(loss, abs=1e-6)
    term.numerator(made.out, made.layout, made.teacher, CTX).backward()
    capped = 0.0 if clip is None else 3.0 if per_batch else 1.0
    assert int((numbers.grad == 0).sum()) == 1 + capped, "a slot at its cap, and the root's, have no gradient"


def test_labels_of_the_length_are_the_useful_share_of_the_block(table: Any) -> None:
    """MD L3: of 15 drafts 0, 3, 7, 15 accepted: .0625, .25, .5, 1; MT 6.7: 5 accepted: .375."""
    accepted = torch.tensor([0, 3, 7, 15, 5, 0])
    labels = torch.zeros(6, 15, dtype=torch.long)
    first = torch.arange(15) < accepted[:, None]
    q = torch.where(first[..., None], torch.tensor([0.7, 0.3]), torch.tensor([0.2, 0.8]))
    valid = torch.ones(6, 15, dtype=torch.bool)
    valid[4, 7:] = False  # no label behind the seventh draft: changes nothing, the sixth is wrong
    valid[5, 0] = False  # a block that is not counted
    made = table(q, q, labels, valid)
    share = LengthLoss().share(made.out, made.layout)[0]
    assert share[:5].tolist() == [0.0625, 0.25, 0.5, 1.0, 0.375]
    guess = torch.full((1, 6), 0.5, requires_grad=True)
    made_out = HeadOutput(made.out.views, {"length": guess})
    numerator = LengthLoss().numerator(made_out, made.layout, None, CTX)
    errors = [(0.5 - x) ** 2 for x in (0.0625, 0.25, 0.5, 1.0, 0.375)]
    found = numerator / LengthLoss().denominator(count_slots(made.layout))
    assert float(found) == pytest.approx(sum(errors) / 5)
    numerator.backward()
    assert guess.grad[0, 5] == 0 and guess.grad[0, 0] > 0 > guess.grad[0, 3]


def test_new_slots_weigh_three_times_as_much() -> None:
    """MT 7: 23 drafts of which 15 were there: the weights sum to 39, and the new slots hold 61.5 % of them."""
    term = SteppedCrossEntropy()
    weights = term.by_order(23)
    assert weights.tolist() == [1.0] * 15 + [3.0] * 8 and float(weights.sum()) == 39.0
    assert float(weights[15:].sum() / weights.sum()) == pytest.approx(0.615, abs=1e-3)
    ones = torch.ones(23)
    assert float(term.denominator(SlotTotals(ones, ones, torch.ones(()), torch.ones(())))) == 39.0


def test_stepped_cross_entropy_is_a_weighted_mean(table: Any) -> None:
    q = torch.tensor([[[0.5, 0.5], [0.2, 0.8], [0.9, 0.1]]], dtype=torch.float64)
    made = table(q, q, torch.tensor([[0, 0, 0]]))
    found = value_of(SteppedCrossEntropy(trained=2, factor=3.0, labels="data"), made)
    want = -(q[0, 0, 0].log() + q[0, 1, 0].log() + 3 * q[0, 2, 0].log()) / 5
    assert found == pytest.approx(float(want))


@pytest.mark.parametrize("term", [ClippedReverseKL(clip=0.5), LengthLoss(), SteppedCrossEntropy(trained=2)])
def test_what_every_loss_must_hold(term: Any) -> None:
    check_loss(term)


@pytest.mark.parametrize(
    ("kind", "setting", "value"),
    [
        (ClippedReverseKL, "clip", 0.0),
        (SteppedCrossEntropy, "factor", 0.0),
        (SteppedCrossEntropy, "trained", -1),
        (LengthLoss, "signal", ""),
    ],
)
def test_settings_that_teach_nothing_are_refused(kind: Any, setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"loss\.{setting}: "):
        kind(**{setting: value})
