"""The head with a memory of the drafted tokens: its law, its start, its causality, and the loss that fades into it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_lightning.block import Anchored
from dflash_lightning.export.formats import FORMATS
from dflash_lightning.head import MarginalHead, PrefixHead
from dflash_lightning.head.memory import TokenMemory
from dflash_lightning.loss import CrossEntropy, FadingCrossEntropy, total_loss
from dflash_lightning.ops.lm_head import LabelLogProb
from dflash_lightning.recipe import load_recipe
from dflash_lightning.recipe.make import make
from dflash_lightning.schedule import fade
from dflash_lightning.testing import toy_batch, toy_module
from dflash_lightning.training.requirements import check_signals
from dflash_lightning.types import StepContext


def small(**settings: Any) -> PrefixHead:
    return PrefixHead(**{"state_size": 5, "rank": 2, **settings})


@pytest.mark.parametrize("pure_slots", [0, 1, 2])
@pytest.mark.parametrize("first_slot", [0, 1])
def test_the_law_in_training_is_the_law_of_the_steps_after_the_same_tokens(
    world: Any, first_slot: int, pure_slots: int
) -> None:
    head = world.randomise(world.build(small(pure_slots=pure_slots), first_slot=first_slot))
    said = world.check_law(head, first_slot).view(3, 3, 3, 3)  # of each text, at each depth
    by_first_token = said[:, :, :, 1]
    assert bool((by_first_token[0] == by_first_token[1]).all()) == (pure_slots > 1), "pure slots know no drafted token"


def test_lanes_step_as_if_each_were_alone(world: Any) -> None:
    world.check_lanes(world.randomise(world.build(small())))


def test_an_untrained_head_is_the_marginal_one_bit_for_bit(world: Any) -> None:
    world.check_start(world.build(small()))


def test_the_memory_is_torchs_gru_and_causal() -> None:
    """MT 3.3 f: changing token 3 changes the states from the third on; slots that are no step change none."""
    own = TokenMemory(4, 6).double()
    gru = torch.nn.GRU(4, 6, bias=False, batch_first=True).double()
    with torch.no_grad():
        gru.weight_ih_l0.copy_(own.read.weight)
        gru.weight_hh_l0.copy_(own.keep.weight)
    seen, steps = torch.randn(1, 2, 5, 4, dtype=torch.float64), torch.ones(1, 2, 5, dtype=torch.bool)
    states = own.along(seen, steps)
    torch.testing.assert_close(states[0], gru(seen[0])[0])
    other = seen.clone()
    other[:, :, 2] += 1.0
    changed = (own.along(other, steps) != states).any(-1)[0]
    assert changed.tolist() == [[False, False, True, True, True]] * 2
    steps[0, 0, 2] = False
    skipped = own.along(other, steps)
    assert torch.equal(skipped[0, 0, 2], states[0, 0, 1])
    torch.testing.assert_close(skipped[0, 0, 3], own.step(states[0, 0, 1], seen[0, 0, 3]))


def test_a_reduced_vocabulary_has_fewer_columns_and_remembers_every_token(world: Any) -> None:
    head = world.randomise(world.build(small(pure_slots=0), draft_vocab_size=2))
    lm, layout = world.lm().restrict(torch.tensor([0, 2])), world.layout()
    hidden = world.hidden(1, 3)
    (found,) = head.outputs(hidden.expand(-1, 27, -1, -1), layout, lm).views["main"].ask(LabelLogProb(layout.labels))
    assert bool((found[layout.labels == 1] == 0).all()) and bool((found[layout.labels != 1] < 0).all())
    scores = head.open(hidden[0], torch.tensor([1]), lm)
    first, second = (world.stepped(scores, [0, 1, 0], root)[0] for root in (1, 2))
    assert first.shape == (2,) and not torch.equal(first, second), "the root is no token of the draft vocabulary"


# -- the loss ---------------------------------------------------------------------------------------------------------


def test_lambda_falls_in_a_straight_line() -> None:
    """MT 3.3 f, at both published lengths."""
    steps = (0, 100, 250, 500, 750, 1000)
    assert [fade(s, 1000, until=0.5) for s in steps] == pytest.approx([1, 0.8, 0.5, 0, 0, 0])
    assert [fade(s, 1000, until=1.0) for s in steps] == pytest.approx([1, 0.9, 0.75, 0.5, 0.25, 0])
    assert fade(0, 10, start=0.4) == pytest.approx(0.4) and fade(0, 0) == 1.0


def test_the_recipes_two_terms_add_up_to_the_published_loss() -> None:
    """lambda .5, final 1.2, base 2.0 -> 1.6."""
    cfg = load_recipe("domino")
    terms = {name: make(dict(node)) for name, node in cfg.loss.items()}
    assert {name: (t.view, t.decay) for name, t in terms.items()} == {"base": ("base", 7.0), "corrected": ("main", 7.0)}
    half = StepContext(500, 1000, 0)
    assert terms["corrected"].coef(half) * 1.2 + terms["base"].coef(half) * 2.0 == pytest.approx(1.6)
    for step in (0, 300, 1000):
        assert sum(t.coef(StepContext(step, 1000, 0)) for t in terms.values()) == pytest.approx(1.0)
    assert (cfg.block.block_size, cfg.block.label_layout, cfg.block.num_anchors) == (16, "anchor_first", 256)
    assert (cfg.head.state_size, cfg.head.rank, make(dict(cfg.head)).pure_slots, cfg.optim.lr) == (1024, 256, 1, 6e-4)


def test_while_lambda_is_one_the_correction_gets_exactly_no_gradient() -> None:
    loss = {"base": FadingCrossEntropy(view="base"), "corrected": FadingCrossEntropy(fades="in")}
    module = toy_module(head=small(), loss=loss)
    batch = toy_batch(module)
    head = module.draft_model.head
    for step, expected in ((0, False), (5, True)):
        module.draft_model.zero_grad()
        out, features = module.outputs(batch)
        shares = module.loss_shares(batch, out, features, StepContext(step, 10, 0), batch.window_totals)
        total_loss(shares).backward()
        moved = [bool((p.grad != 0).any()) for p in head.parameters() if p.grad is not None]
        assert moved == [expected] * len(list(head.parameters()))
    assert float(shares["base"].value.detach()) != float(shares["corrected"].value.detach())


def test_a_term_names_a_view_that_is_there() -> None:
    check_signals({"base": FadingCrossEntropy(view="base")}, small())
    message = r"loss\.base: scores the distribution 'base', but head 'marginal' offers \['main'\]"
    with pytest.raises(ValueError, match=message):
        check_signals({"base": CrossEntropy(view="base")}, MarginalHead())


@pytest.mark.parametrize(
    ("make_part", "message"),
    [
        (lambda: small(state_size=0), r"head\.state_size: 0 knows nothing"),
        (lambda: small(rank=0), r"head\.rank: 0 knows nothing"),
        (lambda: small(pure_slots=-1), r"head\.pure_slots: -1 is no number"),
        (lambda: FadingCrossEntropy(start=1.5), r"loss\.start: 1\.5 is not a share"),
        (lambda: FadingCrossEntropy(until=0), r"loss\.until: 0 is no share"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make_part: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_part()


def test_it_is_not_exported_as_marginals() -> None:
    block = Anchored(block_size=4, num_anchors=24, label_layout="anchor_first")
    config = toy_module(head=small(), block=block).draft_model.config
    for exporter in FORMATS.values():
        held = "Domino" in exporter.holds
        assert held != any("'head': 'prefix'" in reason for reason in exporter.limits(config))
