"""The scorer of edges: zero at the start, the same law in training and decoding; and the loss along reached paths."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash_lightning.decoding.builder import BestFirstTree, ReachTree
from dflash_lightning.decoding.noise import Noise
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec
from dflash_lightning.decoding.types import Round
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.head import EdgeHead, HeadOutput, MarginalHead
from dflash_lightning.loss import ReachLoss
from dflash_lightning.ops.lm_head import LabelLogProb, LanguageHead, View
from dflash_lightning.testing import check_head, check_loss

V, H, DEPTH, ROOT = 3, 4, 3, 2
PATHS = torch.tensor(list(itertools.product(range(V), repeat=DEPTH)))  # every text of three tokens


def make_head(**settings: Any) -> EdgeHead:
    head = EdgeHead(**{"candidates": 2, "rank": 2, "width": 5, "init_std": 0.8, **settings})
    head.build(DraftConfig(hidden_size=H, vocab_size=V, block_size=DEPTH + 1))
    torch.nn.init.normal_(head.rating.weight, std=2.0)
    return head.double()


@pytest.mark.parametrize("first_slot", [0, 1])
def test_the_law_in_training_is_the_law_of_the_steps_after_the_same_tokens(first_slot: int, every_text: Any) -> None:
    head, layout = make_head(), every_text(first_slot=first_slot)
    lm = LanguageHead(torch.randn(V, H, dtype=torch.float64), softcap=2.0)
    hidden = torch.randn(1, 1, DEPTH + first_slot, H, dtype=torch.float64)
    out = head.outputs(hidden.expand(-1, len(PATHS), -1, -1), layout, lm)
    (trained,) = out.views["main"].ask(LabelLogProb(layout.labels))
    scores = head.open(hidden[0, :, first_slot:], torch.tensor([ROOT]), lm)
    assert scores.step is not None and scores.state is None
    total = torch.zeros(len(PATHS), dtype=torch.float64)
    for n, path in enumerate(PATHS.tolist()):
        for depth, (last, token) in enumerate(zip([ROOT, *path], path, strict=False)):
            at, _ = scores.step(None, torch.tensor([[last]]), depth)
            said = at.logits[0, 0].log_softmax(-1)[token]
            torch.testing.assert_close(trained[0, n, first_slot + depth], said)
            total[n] += said
    assert float(total.exp().sum().detach()) == pytest.approx(1.0), "the laws of all texts are no law"
    spread = trained[0, :, -1].view(-1, V)
    assert float((spread - spread[:1]).abs().max().detach()) > 0.1, "no law depends on the token before"


def test_lanes_step_as_if_each_were_alone_and_a_parent_moves_its_own_children_only() -> None:
    head, lm = make_head(), LanguageHead(torch.randn(V, H, dtype=torch.float64))
    scores = head.open(torch.randn(2, DEPTH, H, dtype=torch.float64), torch.tensor([ROOT, 0]), lm)
    tokens = torch.tensor([[1, 0, 1], [2, 2, 0]])
    together, _ = scores.step(None, tokens, 1)
    for b, w in itertools.product(range(2), range(3)):
        alone, _ = scores.step(None, tokens[:, w, None], 1)
        torch.testing.assert_close(together.logits[b, w], alone.logits[b, 0])
    torch.testing.assert_close(together.logits[0, 0], together.logits[0, 2])
    assert not torch.allclose(together.logits[0, 0], together.logits[0, 1])


def test_an_untrained_head_drafts_as_the_marginals_do_bit_for_bit(every_text: Any) -> None:
    """And its tree, at a flat cost, is the best one of the marginals."""
    head, layout = EdgeHead(candidates=2, rank=2, width=5), every_text(first_slot=0)
    head.build(DraftConfig(hidden_size=H, vocab_size=V, block_size=DEPTH))
    lm, hidden = LanguageHead(torch.randn(V, H)), torch.randn(1, len(PATHS), DEPTH, H)
    found, expected = (h.outputs(hidden, layout, lm).views["main"] for h in (head, MarginalHead()))
    assert torch.equal(*(view.ask(LabelLogProb(layout.labels))[0] for view in (found, expected)))
    roots = torch.tensor([ROOT])
    scores, plain = (h.open(hidden[:, 0], roots, lm) for h in (head, MarginalHead()))
    where = Round(torch.tensor([0]), torch.tensor([4]), 0)
    greedy = Sampler(SamplingSpec(), Noise(0))
    ours = ReachTree(budget=9, branch=3).build(roots, scores, where, greedy)
    best = BestFirstTree(budget=9).build(roots, plain, where, greedy)
    assert torch.equal(ours.tokens, best.tokens) and torch.equal(ours.parents, best.parents)


@pytest.mark.parametrize("detach", [False, True])
def test_the_drafter_is_trained_by_the_marginals_and_by_the_scorer_if_it_may(detach: bool, every_text: Any) -> None:
    head, layout = make_head(detach=detach), every_text(first_slot=0)
    lm = LanguageHead(torch.randn(V, H, dtype=torch.float64))
    hidden = torch.randn(1, len(PATHS), DEPTH, H, dtype=torch.float64, requires_grad=True)
    out = head.outputs(hidden, layout, lm)
    (main,) = out.views["main"].ask(LabelLogProb(layout.labels))
    main.sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in head.parameters())
    assert (hidden.grad is None) == detach
    hidden.grad = None
    (plain,) = out.views["base"].ask(LabelLogProb(layout.labels))
    plain.sum().backward()
    assert hidden.grad is not None and bool(hidden.grad.any())


def test_a_reduced_vocabulary_rates_the_targets_ids() -> None:
    head = make_head()
    lm = LanguageHead(torch.randn(V, H, dtype=torch.float64))
    reduced = lm.restrict(torch.tensor([0, 2]))
    hidden = torch.randn(1, DEPTH, H, dtype=torch.float64)
    scores = head.open(hidden, torch.tensor([ROOT]), reduced)
    at, _ = scores.step(None, torch.tensor([[1]]), 0)
    assert at.logits.shape == (1, 1, 2) and at.ids.tolist() == [0, 2]
    before = at.logits.detach().clone()
    with torch.no_grad():
        head.child.weight[1] += 5.0  # a token that this drafter does not have
    torch.testing.assert_close(scores.step(None, torch.tensor([[1]]), 0)[0].logits, before)
    with torch.no_grad():
        head.child.weight[2] += 5.0
    assert not torch.allclose(scores.step(None, torch.tensor([[1]]), 0)[0].logits, before)


def test_the_contracts() -> None:
    check_head(EdgeHead(candidates=4))
    check_loss(ReachLoss())
    with pytest.raises(ValueError, match=r"head\.candidates: 0 rates nothing"):
        EdgeHead(candidates=0)


def test_reaching_a_path_by_hand(every_text: Any) -> None:
    """Edges of .5 and .25: the path is reached with .5 and .125, left with .5 and .375; behind a gap nothing counts."""
    layout = every_text(first_slot=0)
    laws = torch.tensor([[0.5, 0.2, 0.3], [0.25, 0.7, 0.05], [0.4, 0.3, 0.3]]).log()
    hidden = laws.expand(1, len(PATHS), -1, -1)
    lm = LanguageHead(torch.eye(3))
    out = HeadOutput({"main": View.of(hidden, layout.rows, lm)})
    valid = layout.valid.clone()
    valid[..., 2] = False
    term = ReachLoss()
    for layout_, count in ((layout, 3), (replace(layout, valid=valid), 2)):
        found = term.per_slot(out, layout_, None)[0, 0]  # the text 0 0 0
        assert found[:2].tolist() == pytest.approx([-2 * math.log(0.5), -math.log(0.125) - math.log(0.625)], abs=1e-5)
        assert term.counted(layout_)[0, 0].sum() == count
