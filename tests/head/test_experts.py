"""The product of the drafter's marginals and a local expert: its law, its prior, and its training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.data.read.store import DocumentStore
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.export.formats import FORMATS
from dflash_lightning.head import ExpertsHead
from dflash_lightning.loss import CrossEntropy, WeightedLoss
from dflash_lightning.model import save_draft
from dflash_lightning.model.start import DraftPlan
from dflash_lightning.ops.lm_head import LabelLogProb, LanguageHead
from dflash_lightning.recipe import load_recipe
from dflash_lightning.recipe.make import make
from dflash_lightning.testing import check_head, toy_batch, toy_module
from dflash_lightning.types import StepContext

KINDS = ["gru", "markov"]


def small(**settings: Any) -> ExpertsHead:
    return ExpertsHead(**{"state_size": 5, "rank": 2, **settings})


@pytest.mark.parametrize("expert", KINDS)
@pytest.mark.parametrize("first_slot", [0, 1])
def test_the_law_in_training_is_the_law_of_the_steps_after_the_same_tokens(
    world: Any, expert: str, first_slot: int
) -> None:
    head = world.randomise(world.build(small(expert=expert, alpha=1.5), first_slot=first_slot))
    head.count_labels(lambda: {0: 5, 2: 1})
    said = world.check_law(head, first_slot).view(3, 3, 3, 3)  # of each text, at each depth
    knows_the_first_token = not torch.equal(said[0, ..., 2], said[1, ..., 2])
    assert knows_the_first_token == (expert == "gru")


@pytest.mark.parametrize("expert", KINDS)
def test_lanes_step_as_if_each_were_alone(world: Any, expert: str) -> None:
    world.check_lanes(world.randomise(world.build(small(expert=expert, alpha=1.5))))


@pytest.mark.parametrize("expert", KINDS)
def test_without_weights_it_is_the_marginal_head_bit_for_bit(world: Any, expert: str) -> None:
    """Whatever expert and prior say: alpha = beta = 0 is DFlash."""
    head = world.randomise(world.build(small(expert=expert, alpha=0, beta=0)))
    head.count_labels(lambda: {1: 100})
    world.check_start(head)


def test_the_whole_drafter_is_decoded_with_the_law_it_was_trained_with() -> None:
    check_head(small(expert="markov"))  # test_testing.py has the other one


def test_the_worked_example(world: Any) -> None:
    """MH 5.2 f: U (2, 1, 0), local (0, 1.5, .5), prior (.5, .3, .2), alpha = beta = .3, at temperatures 1 and .7."""
    head = world.build(ExpertsHead(expert="markov", rank=3))
    with torch.no_grad():
        head.previous.weight.copy_(torch.eye(3))
        head.following.weight.zero_()
        head.following.weight[:, 1] = torch.tensor([0.0, 1.5, 0.5])
        head.count_labels(lambda: {0: 4, 1: 2, 2: 1})  # and one of each: .5, .3, .2
        lm = LanguageHead(torch.tensor([[2.0, 0, 0, 0], [1.0, 0, 0, 0], [0.0, 0, 0, 0]], dtype=torch.float64))
        hidden = torch.tensor([[[1.0, 0, 0, 0]]], dtype=torch.float64)
        scores = head.open(hidden, torch.tensor([1]), lm)
        (logits,) = world.stepped(scores, [0], root=1)
    assert head.log_prior.exp().tolist() == pytest.approx([0.5, 0.3, 0.2])
    assert logits.tolist() == pytest.approx([2.207944, 1.811192, 0.632831], abs=1e-6)
    assert logits.softmax(-1).tolist() == pytest.approx([0.532061, 0.357811, 0.110128], abs=1e-6)
    assert (logits / 0.7).softmax(-1).tolist() == pytest.approx([0.597826, 0.339173, 0.063000], abs=1e-6)
    local = torch.tensor([0.0, 1.5, 0.5], dtype=torch.float64)
    normalised = head._product(torch.tensor([2.0, 1, 0]).log_softmax(-1), local.log_softmax(-1), head.log_prior)
    assert normalised.softmax(-1).tolist() == pytest.approx(logits.softmax(-1).tolist(), abs=1e-6)


def test_a_reduced_vocabulary_takes_its_own_part_of_the_prior(world: Any) -> None:
    head = world.randomise(world.build(small(alpha=0.5), draft_vocab_size=2))
    head.count_labels(lambda: {0: 9, 2: 4})
    lm, hidden = world.lm().restrict(torch.tensor([0, 2])), world.hidden(1, 3)[0]
    logits = torch.stack(world.stepped(head.open(hidden, torch.tensor([1]), lm), [0, 1, 0]))
    head.beta = 0.0
    without = torch.stack(world.stepped(head.open(hidden, torch.tensor([1]), lm), [0, 1, 0]))
    torch.testing.assert_close(without - logits, (0.3 * head.log_prior[[0, 2]]).expand(3, -1))
    layout = world.layout()
    views = head.outputs(world.hidden(27, 3), layout, lm).views
    for view in views.values():
        (found,) = view.ask(LabelLogProb(layout.labels))
        assert bool((found[layout.labels == 1] == 0).all()) and bool((found[layout.labels != 1] < 0).all())


# -- training ---------------------------------------------------------------------------------------------------------


def test_expert_and_drafter_are_each_trained_as_if_alone() -> None:
    """The gradient of the local term stops at the head, that of the base term never reaches it."""
    terms = {name: make(dict(node)) for name, node in load_recipe("dels").loss.items()}
    assert (terms["local"].decay, terms["local"].normalize, terms["local"].view) == (7.0, "slots", "local")
    module = toy_module(head=small(), loss=terms)
    batch, model = toy_batch(module), module.draft_model
    context = StepContext(0, 10, 0)
    for name, parts in (("local", {"head"}), ("base", {"conditioning", "drafter"})):
        model.zero_grad()
        out, features = module.outputs(batch)
        module.loss_shares(batch, out, features, context, batch.window_totals)[name].value.backward()
        reached = {key for key, p in model.named_parameters() if p.grad is not None and bool((p.grad != 0).any())}
        assert reached == {key for key, _ in model.named_parameters() if key.partition(".")[0] in parts}


def test_the_prior_counts_the_labels_of_the_training_rows() -> None:
    """Prompts do not count. The module asks the data before training begins."""
    store = DocumentStore(
        np.array([0, 6]), np.array([7, 7, 5, 5, 9, 5], dtype=np.int32), np.array([0, 0, 1, 1, 1, 0], dtype=np.bool_)
    )
    assert store.used_ids(labels_only=True) == {5: 2, 9: 1} and store.used_ids() == {5: 3, 7: 2, 9: 1}
    data = SimpleNamespace(
        used_ids=store.used_ids,
        label_counts=lambda: store.used_ids(labels_only=True),
        chat_template_kwargs={},
        summary=SimpleNamespace(why_not_samples=lambda temperature: None, labels="data"),
        feature_products=None,
        bind=lambda *_: None,
    )
    module = toy_module(head=small())
    assert not bool(module.draft_model.head.log_prior.any()), "nobody was asked"
    module.prepare(data)
    prior = module.draft_model.head.log_prior.exp()
    assert prior.sum() == pytest.approx(1.0) and prior[[5, 9, 7]].tolist() == pytest.approx([3 / 35, 2 / 35, 1 / 35])


def test_the_divisor_of_the_local_term_is_the_number_of_slots() -> None:
    """MH 5.2: as in speculators, cross entropies .1, .5, 1 at decay 7 give .428305."""
    term = make(dict(load_recipe("dels").loss.local))
    assert isinstance(term, WeightedLoss)
    weights = torch.exp(-torch.arange(3) / 7.0)
    assert float((weights * torch.tensor([0.1, 0.5, 1.0])).sum() / 3) == pytest.approx(0.428305, abs=1e-6)


def test_the_recipe_has_the_published_settings() -> None:
    head = make(dict(load_recipe("dels").head))
    assert (head.expert, head.state_size, head.rank, head.alpha, head.beta) == ("gru", 1024, 256, 0.3, 0.3)


def test_a_frozen_drafter_stays_as_it_is(tmp_path: Path, tiny_target: Any, make_draft: Any) -> None:
    save_draft(make_draft(tiny_target, num_layers=1), tmp_path / "draft")
    start = {"path": str(tmp_path / "draft"), "parts": ["conditioning", "drafter"], "freeze": True}

    def plan(**settings: Any) -> DraftPlan:
        return DraftPlan(
            block=Anchored(block_size=4),
            conditioning=KVInjection(),
            drafter=BlockTransformer(num_layers=1),
            head=small(),
            init_from={**start, **settings},
        )

    trained = {name for name, p in plan().make(tiny_target, {}).named_parameters() if p.requires_grad}
    assert trained == {
        "head.memory.read.weight",
        "head.memory.keep.weight",
        "head.narrow.weight",
        "head.following.weight",
    }
    assert all(p.requires_grad for p in plan(freeze=False).make(tiny_target, {}).parameters())
    for stated, message in (
        ({"freeze": "yes"}, r"init_from\.freeze: 'yes' is neither true nor false"),
        ({"parts": ["conditioning", "drafter", "head"]}, r"init_from\.freeze: all parts are taken over"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(**stated)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expert": "rnn"}, r"'rnn'[^_]*'markov'"),
        ({"rank": 0}, r"head\.rank: 0 knows nothing"),
        ({"alpha": -0.1}, r"head\.alpha: -0\.1 would turn an expert round"),
    ],
)
def test_settings_that_make_no_head_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):  # the shape hook knows the literals, too
        small(**settings)


def test_it_is_not_exported_as_marginals() -> None:
    config = toy_module(head=small(), loss={"ce": CrossEntropy()}).draft_model.config
    for exporter in FORMATS.values():
        assert any("'head': 'experts'" in reason for reason in exporter.limits(config))
