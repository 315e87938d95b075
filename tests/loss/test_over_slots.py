"""Divergences divided by the slots whatever these weigh (JetSpec): the worked numbers of both ways to train it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from dflash_lightning.block import count_slots
from dflash_lightning.loss import LossTerm
from dflash_lightning.recipe import load_recipe
from dflash_lightning.recipe.make import make
from dflash_lightning.types import StepContext


def term_of(recipe: str) -> LossTerm:
    (node,) = OmegaConf.to_container(load_recipe(recipe).loss, resolve=True).values()
    return make(node)


def test_the_weighted_divergence_is_divided_by_the_slots_and_not_by_the_weights(table: Any) -> None:
    """MH 6.2: divergences .1, .5 and 1 with weights exp(-k/4) over three slots: .365310; over the weights .459446."""
    half = torch.tensor([1.0, 0.0, 0.0]).double().expand(1, 3, 3).clamp(min=1e-30)
    shares = torch.tensor([0.1, 0.5, 1.0]).double().neg().exp()  # of the only token that the target ever says
    q = torch.stack([shares, (1 - shares) / 2, (1 - shares) / 2], dim=-1)[None]
    made = table(q, half, torch.zeros(1, 3, dtype=torch.long))
    totals = count_slots(made.layout, 3)

    def value(term: LossTerm) -> float:
        found = term.numerator(made.out, made.layout, made.teacher, StepContext(0, 1, 0))
        return float(found.detach() / term.denominator(totals))

    assert value(term_of("jetspec_tokens")) == pytest.approx(0.365310, abs=1e-6)
    assert value(term_of("jetspec")) == pytest.approx(1.6 / 3, abs=1e-6), "slots weigh the same"
    by_weights = load_recipe("jetspec_tokens", ["loss.jetspec.normalize=weights"]).loss.jetspec
    assert value(make(OmegaConf.to_container(by_weights))) == pytest.approx(0.459446, abs=1e-6)


def test_the_divergence_and_its_gradient_on_their_worked_example(table: Any) -> None:
    """MT 3.1: p = .6 .3 .1 and q = .2 .5 .3: .396058, and q - p."""
    p, q = torch.tensor([[[0.6, 0.3, 0.1]]]).double(), torch.tensor([[[0.2, 0.5, 0.3]]]).double()
    made, term = table(q, p, torch.zeros(1, 1, dtype=torch.long)), term_of("jetspec")
    found = term.numerator(made.out, made.layout, made.teacher, StepContext(0, 1, 0))
    (gradient,) = torch.autograd.grad(found, made.hidden)
    assert float(found.detach()) == pytest.approx(0.396058, abs=1e-6)
    assert gradient[0, 0, 1].tolist() == pytest.approx([-0.4, 0.2, 0.2])
