"""Losses over candidates: worked numbers, what is counted, and what the divisor is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_lightning.head import LatticeHead, MarginalHead, SelectorHead
from dflash_lightning.head.lattice_network import true_rows
from dflash_lightning.loss import CandidateCrossEntropy, CrossEntropy, LatticeLoss, TotalVariation
from dflash_lightning.ops.candidates import Candidates, spread_law
from dflash_lightning.ops.lm_head import HeadOutput, Teacher, View
from dflash_lightning.training.requirements import check_signals, check_tallies
from dflash_lightning.types import BlockLayout, SlotTotals, StepContext

START = torch.tensor([1.0, 0.5, -0.5])
PAIR = torch.tensor(
    [[[0.2, 0.8, -0.3], [1.0, -0.4, 0.1], [0.0, 0.3, 0.6]], [[0.5, 0.1, 0.9], [-0.2, 0.7, 0.3], [0.4, 0.4, -0.6]]]
)
TARGET = torch.tensor([[2.0, 3, 1], [1.5, 0.5, 2.5], [0, 1, 2]])
RANKS = torch.tensor([1, 0, 2])
CTX = StepContext(0, 1, 0)


class Known(Teacher):
    """The target's logits of the candidates, by heart."""

    def __init__(self, logits: Tensor) -> None:
        self.known = logits

    def logits_at(self, ids: Tensor) -> Tensor:
        return self.known


def worked(make_layout: Callable[..., BlockLayout]) -> tuple[HeadOutput, BlockLayout, Known, Tensor]:
    """MH V1: two equal blocks of three slots; the label of the second slot of block 2 is no candidate."""
    layout = make_layout([[5, 9]], block_size=4)
    predicts = (torch.arange(4) > 0).expand(1, 2, 4)
    ids = torch.arange(9).view(3, 3).expand(1, 2, 3, 3)
    labels = ids.gather(-1, RANKS.expand(1, 2, 3)[..., None])[..., 0].clone()
    labels[0, 1, 1] = 20

    def slots(values: Tensor) -> Tensor:
        return torch.cat([torch.full_like(values[:, :, :1], -1), values], dim=2)

    layout = replace(layout, predicts=predicts, scored=predicts, valid=predicts, labels=slots(labels))
    start = START.repeat(2, 1).requires_grad_()
    scores = true_rows(start, PAIR.repeat(2, 1, 1, 1), RANKS.repeat(2, 1))[None]
    out = HeadOutput({}, candidates=Candidates(slots(ids), slots(scores)))
    return out, layout, Known(slots(TARGET.expand(1, 2, 3, 3))), start


ONE = {"cross_entropy": 0.0, "hinge": 0.0, "penalty": 0.0}


@pytest.mark.parametrize(
    ("settings", "known"),
    [
        ({**ONE, "cross_entropy": 1.0}, 0.865551),
        ({**ONE, "hinge": 1.0, "margin": 2.0}, 1.925),
        ({**ONE, "penalty": 1.0}, 0.643634),
        ({}, 0.377296),
        ({"cross_entropy": 0.125, "hinge": 0.125}, 0.509727),
    ],
)
def test_the_worked_loss(settings: dict[str, float], known: float, make_layout: Any) -> None:
    """MH V1: each part, and both recipes. Four slots count; masks per slot would make them five."""
    out, layout, teacher, _ = worked(make_layout)
    term = LatticeLoss(**settings)
    count = term.tally(out, layout)
    assert float(count) == 4
    found = term.numerator(out, layout, teacher, CTX) / count
    assert float(found.detach()) == pytest.approx(known, abs=1e-6)


def test_the_worked_slots_and_their_gradient(make_layout: Any) -> None:
    """MH V1: the three slots of block 1 by themselves, and the gradient of the first before the division."""
    out, layout, teacher, start = worked(make_layout)
    for settings, known in [
        ({**ONE, "cross_entropy": 1.0}, (1.104131, 0.502693, 0.751251)),
        ({**ONE, "hinge": 1.0}, (2.5, 1.1, 1.6)),
        ({**ONE, "penalty": 1.0}, (0.790453, 0.149166, 0.844465)),
    ]:
        seen = 0.0
        for slot, expected in enumerate(known, start=1):
            alone = replace(layout, valid=layout.valid.clone())
            alone.valid[0, 1] = False  # block 1 alone
            labels = alone.labels.clone()
            labels[0, 0, slot + 1 :] = 20
            total = float(LatticeLoss(**settings).numerator(out, replace(alone, labels=labels), teacher, CTX).detach())
            assert total - seen == pytest.approx(expected, abs=2e-6)
            seen = total
    alone = replace(layout, valid=layout.valid.clone())
    alone.valid[0, 1] = False
    labels = alone.labels.clone()
    labels[0, 0, 2:] = 20
    loss = LatticeLoss().numerator(out, replace(alone, labels=labels), teacher, CTX)
    (gradient,) = torch.autograd.grad(loss, start)
    assert float(loss.detach()) == pytest.approx(0.473646, abs=1e-6)
    torch.testing.assert_close(gradient[0], torch.tensor([0.165269, -0.232634, 0.067364]), rtol=0, atol=1e-6)
    assert not bool(gradient[1].any())


def test_blocks_that_miss_a_label_or_whose_first_label_is_no_candidate_teach_nothing(make_layout: Any) -> None:
    out, layout, teacher, start = worked(make_layout)
    partly = replace(layout, valid=layout.valid.clone())
    partly.valid[0, 0, 3] = False
    elsewhere = layout.labels.clone()
    elsewhere[0, 1, 1] = 20
    term = LatticeLoss()
    loss = term.numerator(out, replace(partly, labels=elsewhere), teacher, CTX)
    (gradient,) = torch.autograd.grad(loss, start, allow_unused=True)
    assert float(term.tally(out, replace(partly, labels=elsewhere))) == 0 == float(loss.detach())
    assert gradient is None or not bool(gradient.any())


def test_what_is_counted_is_summed_over_ranks_and_belongs_to_one_micro_batch(make_layout: Any) -> None:
    out, layout, _, _ = worked(make_layout)
    totals, term = SlotTotals.zeros(3), LatticeLoss()
    assert float(term.divisor(totals, out, layout, lambda vector: 3 * vector)) == 12
    check_tallies({"lattice": term}, 1)
    check_tallies({"ce": CrossEntropy(), "all": CandidateCrossEntropy(divide="all")}, 4)
    for late in (term, CandidateCrossEntropy()):
        with pytest.raises(ValueError, match=r"accumulate_grad_batches: 4, but what loss\.x is divided by"):
            check_tallies({"x": late}, 4)


def test_a_term_of_candidates_and_a_head_that_chooses_need_each_other() -> None:
    lattice, base = {"lattice": LatticeLoss()}, {"ce": CrossEntropy(view="base")}
    check_signals({**base, **lattice}, LatticeHead())
    with pytest.raises(ValueError, match=r"loss\.lattice: reads the candidates.*'lattice', 'selector'"):
        check_signals({**base, **lattice}, MarginalHead())
    for head in (LatticeHead(), SelectorHead()):
        with pytest.raises(ValueError, match=f"loss: no term trains what head '{head.name}' chooses"):
            check_signals(base, head)


def test_total_variation_of_the_choice_is_of_the_whole_vocabulary(table: Any) -> None:
    """MH 2.3: .2, the rate at which rejection rejects; against p renormalised on the candidates it would be .075."""
    p, q = torch.tensor([[[0.4, 0.3, 0.1, 0.15, 0.05]]]), torch.tensor([[[0.5, 0.3, 0.2]]])
    known = table(p, p, torch.tensor([[0]]))
    scores = torch.cat([torch.zeros(1, 3), q[0].log()])[known.layout.rows]
    columns = torch.arange(3).expand(len(scores), 3)
    view = View((scores, columns), known.layout.rows, (1, 1, 2), known.teacher.lm, compose=partial(spread_law, size=5))
    loss = TotalVariation(decay=None).numerator(HeadOutput({"main": view}), known.layout, known.teacher, CTX)
    assert float(loss) == pytest.approx(0.2, abs=1e-6)


def test_weights_that_teach_nothing_or_the_opposite_are_refused() -> None:
    with pytest.raises(ValueError, match=r"loss\.hinge: -1.0 would teach the opposite"):
        LatticeLoss(hinge=-1.0)
    with pytest.raises(ValueError, match="all weights of the term are 0"):
        LatticeLoss(**ONE)
