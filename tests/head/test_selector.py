"""The selector head: worked numbers of its law and its losses, its start, and the gradient that may be kept back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_lightning.decoding.builder import BestChain
from dflash_lightning.decoding.noise import Noise
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec
from dflash_lightning.decoding.types import Round
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.head import MarginalHead, SelectorHead
from dflash_lightning.loss import CandidateCrossEntropy, CrossEntropy, total_loss
from dflash_lightning.ops.candidates import Candidates
from dflash_lightning.ops.lm_head import Argmax, HeadOutput, LabelLogProb, LanguageHead
from dflash_lightning.testing import check_head, check_loss, toy_batch, toy_module
from dflash_lightning.types import BlockLayout, SlotTotals, StepContext

CTX = StepContext(0, 1, 0)


def head_of(bonus: Tensor, candidates: int) -> SelectorHead:
    """A head that adds ``bonus[a, b]`` to token ``b`` after token ``a`` where the hidden state begins with 1."""
    size = len(bonus)
    head = SelectorHead(candidates=candidates, rank=size)
    head.build(DraftConfig(hidden_size=size + 1, vocab_size=size, block_size=3, mask_token_id=0))
    selector = head.candidate_selector
    selector.predecessor_codebook.data = torch.eye(size)
    selector.successor_codebook.data = bonus.T.clone()
    selector.hidden_projection.weight.data = torch.zeros(size, size + 1)
    selector.hidden_projection.weight.data[:, 0] = 1.0
    return head


def given(logits: Tensor) -> tuple[Tensor, LanguageHead]:
    """Hidden states and a language head that have these ``logits`` [D, V]."""
    return torch.nn.functional.pad(logits, (1, 0), value=1.0), LanguageHead(torch.eye(logits.shape[1] + 1)[1:])


def test_the_worked_walk_and_its_laws() -> None:
    """MT 3.4 f: the walk is (1, 1), where the likeliest tokens of the slots are (0, 0)."""
    bonus = torch.zeros(3, 3)
    bonus[0, 1], bonus[1, 1] = 0.8, 1.0
    hidden, lm = given(torch.tensor([[2.0, 1.5, 0.0], [1.0, 0.9, 0.2]]))
    scores = head_of(bonus, 3).open(hidden[None], torch.tensor([0]), lm)
    where = Round(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), 0)
    greedy = Sampler(SamplingSpec(temperature=0.0), Noise(0))
    assert BestChain().build(torch.tensor([0]), scores, where, greedy).tokens.tolist() == [[0, 1, 1]]
    assert scores.step is not None
    for depth, last, known in [(0, 0, [0.402383, 0.543160, 0.054457]), (1, 1, [0.255824, 0.629226, 0.114949])]:
        at, _ = scores.step(scores.state, torch.tensor([[last]]), depth)
        torch.testing.assert_close(at.logits[0, 0].softmax(-1), torch.tensor(known), rtol=0, atol=1e-6)


def test_scale_and_cap_come_before_the_candidates_and_the_bonus() -> None:
    """MH 2.3: 27.933288, 9.645382, -17.483488."""
    hidden, plain = given(torch.tensor([[100.0, 20.0, -40.0]]))
    lm = replace(plain, scale=0.5, softcap=30.0)
    bonus = torch.zeros(3, 3)
    bonus[2, 1] = 40.0
    scores = head_of(bonus, 2).open(hidden[None], torch.tensor([2]), lm)
    torch.testing.assert_close(scores.logits[0, 0], torch.tensor([27.933288, 9.645382]))
    assert scores.step is not None
    at, _ = scores.step(scores.state, torch.tensor([[2]]), 0)
    torch.testing.assert_close(at.logits[0, 0], torch.tensor([27.933288, 49.645382]))


def test_the_published_size() -> None:
    """MH 2.1: 78 839 808 weights, of which 77 791 232 in the codebooks."""
    with torch.device("meta"):
        head = SelectorHead()
        head.build(DraftConfig(hidden_size=4096, vocab_size=151936, block_size=8, mask_token_id=0))
    assert sum(p.numel() for p in head.parameters()) == 78_839_808
    assert sorted(head.state_dict()) == [
        "candidate_selector.hidden_projection.weight",
        "candidate_selector.predecessor_codebook",
        "candidate_selector.successor_codebook",
    ]


def test_an_untrained_head_chooses_as_the_marginals_do() -> None:
    """The likeliest token, and the marginals' law given that the token is a candidate."""
    head, marginal = SelectorHead(candidates=4, rank=3), MarginalHead()
    head.build(DraftConfig(hidden_size=6, vocab_size=9, block_size=4, mask_token_id=0))
    lm, hidden, roots = LanguageHead(torch.randn(9, 6)), torch.randn(2, 3, 6), torch.tensor([1, 2])
    scores, base = head.open(hidden, roots, lm), marginal.open(hidden, roots, lm).logits
    assert scores.step is not None and scores.ids is not None
    for depth in range(3):
        at, _ = scores.step(scores.state, torch.tensor([[5, 8], [0, 3]]), depth)
        assert at.ids is not None
        assert torch.equal(at.ids[..., 0], base[:, depth, None].argmax(-1).expand(2, 2))
        assert torch.equal(at.logits, base[:, depth, None].expand(2, 2, 9).gather(-1, at.ids))


def test_the_laws_of_training_and_decoding_are_one() -> None:
    for head in (SelectorHead(candidates=4, rank=3), SelectorHead(candidates=1, rank=2, detach=True)):
        check_head(head)
    for term in (CandidateCrossEntropy(), CandidateCrossEntropy(missing="replace_last", decay=4.0)):
        check_loss(term, SelectorHead(candidates=16, rank=3))
    check_loss(CandidateCrossEntropy(divide="all", prefix=True), SelectorHead(candidates=16, rank=3))


def one_slot(make_layout: Callable[..., BlockLayout], label: int) -> BlockLayout:
    layout = make_layout([[5]], block_size=2)
    predicts = torch.tensor([[[False, True]]])
    return replace(
        layout,
        predicts=predicts,
        scored=predicts,
        valid=predicts,
        rows=torch.tensor([1]),
        labels=torch.tensor([[[0, label]]]),
    )


def test_a_label_that_is_no_candidate_is_left_out_or_takes_the_last_place(make_layout: Any) -> None:
    """MH 2.3: scores (3, 2.4, .5) and 2.989130; what is drafted from stays the three likeliest."""
    bonus = torch.zeros(6, 6)
    bonus[0, 1], bonus[0, 2], bonus[0, 4] = 0.4, -0.2, 1.5
    hidden, lm = given(torch.tensor([[3.0, 2.0, 1.0, 0.5, -1.0, -2.0]]))
    layout = one_slot(make_layout, label=4)
    out = head_of(bonus, 3).outputs(hidden.expand(1, 1, 2, 7), layout, lm)
    assert out.candidates is not None and out.candidates.ids[0, 0].tolist() == [[-1] * 3, [0, 1, 2]]
    replaced, dropped = CandidateCrossEntropy(missing="replace_last"), CandidateCrossEntropy()
    assert float(replaced.numerator(out, layout, None, CTX).detach()) == pytest.approx(2.989130, abs=1e-6)
    assert float(dropped.numerator(out, layout, None, CTX).detach()) == 0.0 == float(dropped.tally(out, layout))
    assert not replaced.tallies and dropped.tallies
    (best, label) = out.views["main"].ask(Argmax(), LabelLogProb(layout.labels))
    assert int(best[0, 0, 1]) == 0 and float(label[0, 0, 1].detach()) < -1e3


@pytest.mark.parametrize(("decay", "covered", "whole"), [(None, 1.966667, 1.7), (7.0, 1.839287, 1.593216)])
def test_the_divisor_is_of_the_covered_slots_or_of_all(
    decay: float | None, covered: float, whole: float, make_layout: Any
) -> None:
    """MH 2.3: base (.5, 1, 2) and selector (.4, none, 1.2)."""
    layout = make_layout([[5]], block_size=4)
    predicts = torch.tensor([[[False, True, True, True]]])
    layout = replace(layout, predicts=predicts, scored=predicts, valid=predicts, labels=torch.tensor([[[9, 0, 7, 0]]]))
    chances = torch.tensor([0.5, 0.4, 0.5, 1.2]).neg().exp()
    scores = torch.stack([chances, 1 - chances], -1).log()[None, None]
    out = HeadOutput({}, candidates=Candidates(torch.tensor([0, 1]).expand(1, 1, 4, 2), scores))
    totals = SlotTotals(torch.ones(3), torch.ones(3), torch.tensor(1.0), torch.tensor(1.0))
    base = torch.tensor([0.5, 1.0, 2.0])
    weights = torch.ones(3) if decay is None else torch.exp(-torch.arange(3) / decay)
    found = (weights * base).sum() / weights.sum()
    for divide, known in [("covered", covered), ("all", whole)]:
        term = CandidateCrossEntropy(divide=divide, decay=decay)
        share = term.numerator(out, layout, None, CTX) / term.divisor(totals, out, layout, lambda vector: vector)
        assert float(found + share) == pytest.approx(known, abs=1e-6)


def test_detached_it_leaves_the_drafter_to_the_base_loss_bit_for_bit() -> None:
    terms = {"base": CrossEntropy(view="base"), "choice": CandidateCrossEntropy(coefficient=0.5)}
    gradients = {}
    for detach in (False, True):
        for names in (("base",), ("base", "choice")):
            module = toy_module(head=SelectorHead(candidates=16, rank=3, detach=detach), loss=terms)
            batch = toy_batch(module)
            out, features = module.outputs(batch)
            shares = module.loss_shares(batch, out, features, CTX, batch.window_totals)
            total_loss({name: shares[name] for name in names}).backward()
            model = module.draft_model
            gradients[detach, names] = [p.grad.clone() for p in model.drafter.parameters() if p.grad is not None]
            if "choice" in names:
                assert all(bool((p.grad != 0).any()) for p in model.head.parameters() if p.grad is not None)
    base, both, kept = (
        gradients[k] for k in [(False, ("base",)), (False, ("base", "choice")), (True, ("base", "choice"))]
    )
    assert base and all(torch.equal(a, b) for a, b in zip(base, kept, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(base, both, strict=True))
