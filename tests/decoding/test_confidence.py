"""Cutting drafts by the head's confidence: which drafts are judged, and what is refused."""

import pytest
import torch

from dflash_lightning.decoding.builder import SampledChain
from dflash_lightning.decoding.noise import Noise
from dflash_lightning.decoding.policy import ConfidencePolicy, WidthPolicy
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec
from dflash_lightning.decoding.types import Draft, Round, Scores
from dflash_lightning.decoding.verifier import BlockVerifier, MatchVerifier, RejectionVerifier

SIGNAL = torch.tensor([[0.9, 0.8, 0.5, 0.9], [0.6, 0.5, 0.4, 0.9], [0.3, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
ROUND = Round(torch.arange(4), torch.zeros(4, dtype=torch.long), 0)


def draft_with(signal: torch.Tensor) -> Draft:
    return Draft(
        torch.zeros(len(signal), signal.shape[1] + 1, dtype=torch.long), "delta", signals={"confidence": signal}
    )


@pytest.mark.parametrize(
    ("threshold", "cumulative", "expected"),
    [
        (0.6, False, [2, 1, 0, 4]),
        (0.5, False, [4, 2, 0, 4]),
        (0.0, False, [4, 4, 4, 4]),
        (0.5, True, [2, 1, 0, 4]),
        (0.36, True, [3, 1, 0, 4]),
        (1.0, True, [0, 0, 0, 4]),
    ],
)
def test_the_first_low_confidence_ends_the_draft(threshold, cumulative, expected) -> None:
    """Products of the first row: .9, .72, .36, .324; a draft at the threshold is judged."""
    policy = ConfidencePolicy(threshold=threshold - 1e-6 if threshold else 0.0, cumulative=cumulative)
    assert policy.width(draft_with(SIGNAL), ROUND).tolist() == expected


def test_it_is_a_component_that_says_what_it_needs() -> None:
    policy = ConfidencePolicy(threshold=0.25, cumulative=True)
    assert WidthPolicy.from_settings("confidence", policy.settings()).settings() == policy.settings()
    assert policy.reads == ("confidence",) and policy.sees == "laws"
    with pytest.raises(ValueError, match=r"decoding\.policy\.threshold: 1\.5 .* 0 cuts nothing"):
        ConfidencePolicy(threshold=1.5)
    with pytest.raises(ValueError, match=r"reads the signal 'confidence', but the draft has \['length'\]"):
        policy.width(Draft(torch.zeros(1, 3, dtype=torch.long), "delta", signals={"length": torch.ones(1)}), ROUND)


@pytest.mark.parametrize("verifier", [MatchVerifier, RejectionVerifier, BlockVerifier])
def test_a_width_that_cuts_nothing_changes_nothing(verifier) -> None:
    """And a cut draft is judged as if it had been drafted so short, with the target's full law after it."""
    n, generator = 200, torch.Generator().manual_seed(0)
    sampler = Sampler(SamplingSpec(temperature=1.0), Noise(0))
    where = Round(torch.arange(n), torch.zeros(n, dtype=torch.long), 3)
    scores = Scores(torch.randn(n, 4, 5, generator=generator))
    draft = SampledChain().build(torch.zeros(n, dtype=torch.long), scores, where, sampler)
    logits = scores.logits[:, :1] * 0.5 + torch.randn(n, 5, 5, generator=generator)
    whole = verifier().verify(draft, logits, where, sampler)
    same = verifier().verify(draft.cut(torch.full((n,), 4)), logits, where, sampler)
    assert torch.equal(same.accepted, whole.accepted) and torch.equal(same.following, whole.following)
    width = torch.arange(n) % 5
    cut = verifier().verify(draft.cut(width), logits, where, sampler)
    assert (cut.accepted <= width).all() and (cut.accepted == width).sum() > n / 10
    for w in range(1, 5):
        short = SampledChain().build(torch.zeros(n, dtype=torch.long), Scores(scores.logits[:, :w]), where, sampler)
        alone = verifier().verify(short, logits[:, : w + 1], where, sampler)
        rows = width == w
        assert torch.equal(cut.accepted[rows], alone.accepted[rows])
        assert torch.equal(cut.following[rows], alone.following[rows])
