"""Drafts drawn in turn from a head with a memory give exactly the target's law; declared as marginals they do not.

Exact: every course of events is played through the shipped head, builder, policy and verifier (``enumeration.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from dflash_lightning.decoding.builder import SampledChain
from dflash_lightning.decoding.law import Law
from dflash_lightning.decoding.policy import ConfidencePolicy
from dflash_lightning.decoding.types import Draft
from dflash_lightning.decoding.verifier import BlockVerifier, MatchVerifier, RejectionVerifier
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.head import DraftHead, ExpertsHead, MarkovHead, PrefixHead, RefinerHead
from dflash_lightning.ops.lm_head import LanguageHead
from dflash_lightning.types import Scores

DEPTH, WIDTH = 3, 4


def target(enumeration: ModuleType) -> Any:
    """A law for every text, not far from flat, so that chains of every length are accepted."""
    generator = torch.Generator().manual_seed(0)
    return enumeration.Table(
        lambda text: (0.7 * torch.randn(3, generator=generator)).softmax(-1).tolist(), 3, DEPTH + 1
    )


HEADS: dict[str, Callable[[], DraftHead]] = {
    "plain": lambda: MarkovHead(rank=2, confidence=True),
    "gated": lambda: MarkovHead(rank=2, variant="gated", confidence=True),
    "recurrent": lambda: MarkovHead(rank=2, variant="recurrent", confidence=True),
    "prefix": lambda: PrefixHead(state_size=3, rank=2),
    "refiner": lambda: RefinerHead(rank=2, passes=None),
    # Drawn all at once: played as independent draws of both passes. Keyed noise makes them depend on each other slot by
    # slot, which is as exact: what the slots before drew says nothing of a slot's own noise.
    "refiner in passes": lambda: RefinerHead(rank=2, passes=1),
    "experts": lambda: ExpertsHead(state_size=3, rank=2, alpha=1.5),
    "experts by the last token": lambda: ExpertsHead(expert="markov", rank=2, alpha=1.5),
}


def proposer(kind: str) -> Callable[[int], Scores]:
    """A head with random weights on one block of random hidden states, for as many rows as asked for."""
    generator = torch.Generator().manual_seed(3)
    head = HEADS[kind]()
    head.build(DraftConfig(hidden_size=WIDTH, vocab_size=3, block_size=DEPTH, label_layout="anchor_first"))
    for weight in head.parameters():
        weight.data = 0.7 * torch.randn(weight.shape, generator=generator)
    embedding = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(4))
    lm = LanguageHead(torch.randn(3, WIDTH, generator=generator), embedding=embedding)
    hidden = 0.7 * torch.randn(1, DEPTH, WIDTH, generator=generator)

    def scores(rows: int) -> Scores:
        with torch.no_grad():
            found = head.open(hidden.expand(rows, -1, -1), torch.zeros(rows, dtype=torch.long), lm)
        step, draw = found.step, found.draw
        assert step is not None
        return replace(found, step=torch.no_grad()(step), draw=None if draw is None else torch.no_grad()(draw))

    return scores


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("verifier", [RejectionVerifier, BlockVerifier, MatchVerifier])
def test_a_chain_drawn_in_turn_gives_the_law_of_the_target(enumeration: ModuleType, kind: str, verifier: type) -> None:
    play = enumeration.Play(target(enumeration), proposer(kind), SampledChain(), verifier())
    outcome = play.outcome()
    assert outcome.gap < 1e-6
    assert min(outcome.accepted) > 0.01, "some length is hardly ever accepted: little is tested"


def test_cut_by_a_confidence_that_knows_the_token_before_it_stays_lossless(enumeration: ModuleType) -> None:
    """After token 0 the second draft is believed in, after the others it is not; the first always is."""
    scores = proposer("plain")
    after = [float(scores(1).step(None, torch.tensor([[t]]), 1)[0].signals["confidence"]) for t in range(3)]
    threshold = 0.45
    assert after[0] > threshold > max(after[1:])
    policy = ConfidencePolicy(threshold=threshold)
    for verifier in (RejectionVerifier(), BlockVerifier()):
        play = enumeration.Play(target(enumeration), scores, SampledChain(), verifier, policy)
        whole = enumeration.Play(target(enumeration), scores, SampledChain(), verifier)
        outcome = play.outcome()
        assert outcome.gap < 1e-6
        assert 0.3 < outcome.mean_accepted < whole.outcome().mean_accepted - 0.1, "the policy cuts nothing, or all"
        assert min(outcome.accepted) > 0.01


def test_declaring_the_first_look_as_the_law_is_found(enumeration: ModuleType) -> None:
    """The fault of a builder that draws in turn and hands the marginals to the verifier (MD V7: TV 39/700 there)."""
    scores = proposer("plain")

    def as_marginals(draft: Draft) -> Draft:
        return replace(draft, law=Law(scores(len(draft.tokens)).logits.softmax(-1)))

    play = enumeration.Play(target(enumeration), scores, SampledChain(), RejectionVerifier(), change=as_marginals)
    assert play.outcome().gap > 0.05
