"""The marginals with a guess of how far a draft stands: the same law, and a signal that trains the drafter."""

from __future__ import annotations

import pytest
import torch

from dflash_lightning.block import Anchored, merge_layouts
from dflash_lightning.decoding.policy import ConfidencePolicy
from dflash_lightning.decoding.types import Draft, Round
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.head import DraftHead, MarginalHead, SurvivalHead
from dflash_lightning.loss import ConfidenceLoss, CrossEntropy
from dflash_lightning.ops.lm_head import LabelLogProb, LanguageHead
from dflash_lightning.training.requirements import check_signals
from dflash_lightning.types import Alignment, Document


def built() -> SurvivalHead:
    head = DraftHead.from_settings("survival", SurvivalHead().settings())
    head.build(DraftConfig(hidden_size=6))
    return head


def test_it_drafts_as_the_marginals_do_and_says_the_same_in_training_and_decoding() -> None:
    head, lm = built(), LanguageHead(torch.randn(20, 6))
    document = Document(0, torch.arange(12), torch.arange(12) >= 4)
    part = Anchored(block_size=4).blocks(document, Alignment(4, 19), seed=0, epoch=0)
    layout = merge_layouts([[(0, part)]], num_blocks=9, alignment=Alignment(4, 19))
    hidden = torch.randn(1, 9, 4, 6, requires_grad=True)
    out = head.outputs(hidden, layout, lm)
    assert torch.equal(out.signals["confidence"], torch.full((1, 9, 4), 0.5)), "at the start it knows nothing"
    torch.nn.init.normal_(head.survive.weight)
    out = head.outputs(hidden, layout, lm)
    plain = MarginalHead().outputs(hidden, layout, lm).views["main"]
    assert torch.equal(*(view.ask(LabelLogProb(layout.labels))[0] for view in (out.views["main"], plain)))
    scores, want = (h.open(hidden[:, 2], torch.tensor([3]), lm) for h in (head, MarginalHead()))
    assert torch.equal(scores.logits, want.logits) and scores.step is None
    assert torch.allclose(scores.signals["confidence"], out.signals["confidence"][:, 2], rtol=0, atol=1e-6)
    (gradient,) = torch.autograd.grad(out.signals["confidence"].sum(), hidden)
    assert (gradient.abs().sum(-1) > 0).all(), "its gradient goes on into the drafter"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head.outputs(hidden, layout, lm).signals["confidence"].dtype == torch.float32


def test_a_policy_cuts_at_the_first_low_chance_and_multiplies_nothing() -> None:
    """Chances .9 .7 .65 .4 of the whole draft: three drafts at .6, where running products would leave two."""
    draft = Draft(torch.zeros(1, 5, dtype=torch.long), "delta")
    draft.signals = {"confidence": torch.tensor([[0.9, 0.7, 0.65, 0.4]])}
    where = Round.__new__(Round)  # not looked at
    assert ConfidencePolicy(threshold=0.6).width(draft, where).tolist() == [3]
    assert ConfidencePolicy(threshold=0.6, cumulative=True).width(draft, where).tolist() == [2]


def test_its_signal_needs_a_loss() -> None:
    check_signals({"ce": CrossEntropy(), "survival": ConfidenceLoss(label="survival")}, SurvivalHead())
    with pytest.raises(ValueError, match=r"head\.confidence: no loss term trains this signal"):
        check_signals({"ce": CrossEntropy()}, SurvivalHead())
