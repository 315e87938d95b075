"""A head that guesses how much of a block stands, and the policy that judges as many drafts."""

from __future__ import annotations

import pytest
import torch

from dflash_lightning.decoding.builder import SampledChain
from dflash_lightning.decoding.noise import Noise
from dflash_lightning.decoding.policy import LengthPolicy, WidthPolicy
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec
from dflash_lightning.decoding.types import Draft, Round
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.head import DraftHead, LengthHead, MarginalHead
from dflash_lightning.loss import CrossEntropy, LengthLoss
from dflash_lightning.ops.lm_head import LanguageHead
from dflash_lightning.testing import check_head, check_policy
from dflash_lightning.training.requirements import check_signals

ROUND = Round(torch.arange(4), torch.zeros(4, dtype=torch.long), 0)


def built(width: int = 5) -> LengthHead:
    head = DraftHead.from_settings("length", LengthHead(width=width).settings())
    head.build(DraftConfig(hidden_size=6, block_size=4))
    return head


def test_it_drafts_as_the_marginals_do_and_its_guess_stays_with_itself() -> None:
    head, lm = built(), LanguageHead(torch.randn(20, 6))
    hidden = torch.randn(3, 4, 6, requires_grad=True)
    roots = torch.tensor([1, 2, 3])
    scores, want = (h.open(hidden, roots, lm) for h in (head, MarginalHead()))
    assert torch.equal(scores.logits, want.logits) and scores.step is None
    torch.nn.init.normal_(head.guess.weight)
    found = head.length(hidden)
    x = torch.cat([hidden.mean(1), hidden[:, -1]], dim=-1)
    y = torch.nn.functional.silu(head.read(x))
    y = y + torch.nn.functional.silu(head.deepen(y))
    torch.testing.assert_close(found, head.guess(y)[:, 0].sigmoid())
    assert found.shape == (3,) and len(set(found.tolist())) == 3
    found.sum().backward()
    assert hidden.grad is None and head.read.weight.grad.abs().sum() > 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head.length(hidden).dtype == torch.float32


def test_training_and_decoding_say_the_same() -> None:
    check_head(LengthHead(width=5))


def test_its_signal_needs_a_loss() -> None:
    check_signals({"ce": CrossEntropy(), "length": LengthLoss()}, LengthHead())
    with pytest.raises(ValueError, match=r"head\.length: no loss term trains this signal"):
        check_signals({"ce": CrossEntropy()}, LengthHead())
    with pytest.raises(ValueError, match=r"head\.width: 0 "):
        LengthHead(width=0)


def draft_with(length: list[float], drafts: int = 15) -> Draft:
    tokens = torch.zeros(len(length), drafts + 1, dtype=torch.long)
    return Draft(tokens, "delta", signals={"length": torch.tensor(length)})


@pytest.mark.parametrize(
    ("rate", "least", "expected"), [(1.0, 1, [1, 4, 8, 15]), (1.3, 1, [2, 6, 11, 15]), (0.1, 2, [2, 2, 2, 2])]
)
def test_the_width_is_the_guess_times_the_rate(rate: float, least: int, expected: list[int]) -> None:
    """Blocks of 16: shares of .0625, .25, .5, 1 are 1, 4, 8, 16 tokens, the root's among them."""
    policy = LengthPolicy(rate=rate, least=least)
    assert policy.width(draft_with([0.0625, 0.25, 0.5, 1.0]), ROUND).tolist() == expected


def test_it_is_a_component_that_says_what_it_needs() -> None:
    policy = LengthPolicy(rate=2.0, least=0)
    assert WidthPolicy.from_settings("length", policy.settings()).settings() == policy.settings()
    assert policy.reads == ("length",) and policy.sees == "laws"
    check_policy(policy)
    with pytest.raises(ValueError, match=r"reads the signal 'length', but the draft has \['confidence'\]"):
        policy.width(Draft(torch.zeros(1, 3, dtype=torch.long), "delta", signals={"confidence": torch.ones(1)}), ROUND)
    for setting, value in (("rate", 0.0), ("least", -1)):
        with pytest.raises(ValueError, match=rf"decoding\.policy\.{setting}: "):
            LengthPolicy(**{setting: value})


def test_a_guess_is_made_before_the_draws_and_does_not_know_them() -> None:
    """What rejection needs of a width; the draws differ, the widths do not."""
    head, lm = built(), LanguageHead(torch.randn(20, 6))
    torch.nn.init.normal_(head.guess.weight)
    scores = head.open(torch.randn(1, 4, 6).expand(40, -1, -1), torch.zeros(40, dtype=torch.long), lm)
    where = Round(torch.arange(40), torch.zeros(40, dtype=torch.long), 0)
    sampler = Sampler(SamplingSpec(temperature=1.0), Noise(0))
    draft = SampledChain().build(torch.zeros(40, dtype=torch.long), scores, where, sampler)
    assert len(draft.tokens.unique(dim=0)) > 10
    assert len(LengthPolicy().width(draft, where).unique()) == 1
