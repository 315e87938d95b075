"""Committed tokens and rejected drafts: the two numbers of a slot, and how a block's are joined."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dflash_lightning.loss import OnPolicyLoss
from dflash_lightning.loss.on_policy import committed_loss, rejected_loss
from dflash_lightning.testing import check_loss
from dflash_lightning.types import StepContext

CTX = StepContext(0, 1, 0)


def log(*chances: float) -> torch.Tensor:
    return torch.tensor(chances, dtype=torch.float64).log()


def test_the_sheet_s_numbers() -> None:
    """MH 3.6: the forward KL of the event, and r - log r - 1."""
    found = committed_loss(log(0.5, 0.6, 0.2), log(0.8, 0.6, 0.3)).tolist()
    assert found == pytest.approx([0.192745, 0.0, 0.028168], abs=1e-6)
    found = rejected_loss(log(0.4, 0.3, 0.25), log(0.05, 0.2, 0.01)).tolist()
    assert found == pytest.approx([1.204442, 0.072132, 2.258876], abs=1e-6)
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    assert float((q * rejected_loss(q.log(), p.log())).sum()) == pytest.approx(0.365274, abs=1e-6)  # KL(q, p)
    assert float(rejected_loss(q.log(), p.log())[1]) == pytest.approx(0.110826, abs=1e-6)  # at q's likeliest token


def test_neither_is_negative_and_a_rejected_draft_is_pushed_towards_the_target() -> None:
    chances = torch.linspace(0.01, 0.99, 12, dtype=torch.float64)
    q, p = (x.flatten() for x in torch.meshgrid(chances, chances, indexing="ij"))
    s = q.log().requires_grad_()
    assert float(committed_loss(s, p.log()).min()) >= 0 and float(rejected_loss(s, p.log()).min()) >= 0
    assert float(committed_loss(p.log(), p.log()).abs().max()) < 1e-12
    (slope,) = torch.autograd.grad(rejected_loss(s, p.log()).sum(), s)
    away = (q - p).abs() > 1e-9
    inside = away & (rejected_loss(q.log(), p.log()) < 10)
    assert torch.equal((slope > 0)[inside], (q > p)[inside])
    certain = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    committed_loss(certain, log(0.5)).sum().backward()
    assert torch.isfinite(certain.grad).all(), "a drafter that is certain is no infinity"


def test_a_block_joins_both_streams_by_their_weights(table: Any) -> None:
    """MH 3.6: three committed tokens, rejected drafts in places 3, 4, 5 with weights .64, .512, .4096: .428341."""
    law = torch.tensor([0.5, 0.25, 0.2, 0.05])
    q = law.repeat(1, 5, 1)
    q[0, 1] = torch.tensor([0.6, 0.2, 0.1, 0.1])
    q[0, 2] = torch.tensor([0.2, 0.4, 0.3, 0.1])  # token 0 is committed, token 1 was rejected
    q[0, 3] = torch.tensor([0.3, 0.3, 0.2, 0.2])
    q[0, 4] = torch.tensor([0.25, 0.25, 0.25, 0.25])
    valid = torch.tensor([[True, True, True, False, False]])
    made = table(q, q, torch.zeros(1, 5, dtype=torch.long), valid)
    layout = made.layout
    layout.scored = torch.tensor([[[False] + [True] * 5]])
    layout.rows = layout.scored.flatten().nonzero().squeeze(1)
    layout.streams = {
        "teacher": torch.tensor([[[1.0, *log(0.8, 0.6, 0.3).tolist(), 1.0, 1.0]]]),
        "rejected": torch.tensor([[[-1, -1, -1, 1, 1, 1]]]),
        "rejected_teacher": torch.tensor([[[1.0, 1.0, 1.0, *log(0.05, 0.2, 0.01).tolist()]]]),
    }
    term = OnPolicyLoss()
    numerator = term.numerator(made.out, layout, None, CTX)
    tally = term.tally(made.out, layout)
    assert float(tally) == pytest.approx(3 + 0.64 + 0.512 + 0.4096)
    assert (numerator / tally).item() == pytest.approx(0.428341, abs=1e-6)
    (gradient,) = torch.autograd.grad(numerator, made.hidden)
    assert gradient[0, 0, 0].abs().max() == 0 and (gradient[0, 0, 1:].abs().amax(-1) > 0).tolist()[2:] == [True] * 3
    only = OnPolicyLoss(rejected=0.0)
    found = only.numerator(made.out, layout, None, CTX) / only.tally(made.out, layout)
    assert found.item() == pytest.approx(0.073637, abs=1e-6)
    only = OnPolicyLoss(committed=0.0)
    found = only.numerator(made.out, layout, None, CTX) / only.tally(made.out, layout)
    assert found.item() == pytest.approx(1.109765, abs=1e-6)


def test_what_every_loss_must_hold_and_settings_that_teach_nothing() -> None:
    check_loss(OnPolicyLoss())
    for settings in ({"committed": 0.0, "rejected": 0.0}, {"fade": 0.0}, {"committed": -1.0}):
        with pytest.raises(ValueError, match=r"loss\.(committed|fade): "):
            OnPolicyLoss(**settings)
    assert math.isfinite(float(rejected_loss(torch.tensor(-80.0), torch.tensor(0.0))))
