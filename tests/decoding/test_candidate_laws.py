"""Drafts chosen among a few candidates give exactly the target's law, whose other tokens they can never be.

Exact: every course of events is played through the shipped heads, builders and verifiers (``enumeration.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from dflash_lightning.decoding.builder import BestFirstTree, SampledChain, SampledTree
from dflash_lightning.decoding.law import Law
from dflash_lightning.decoding.types import Draft, Scores
from dflash_lightning.decoding.verifier import BlockVerifier, MatchVerifier, RejectionVerifier
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.head import DraftHead, LatticeHead, SelectorHead
from dflash_lightning.ops.lm_head import LanguageHead

DEPTH, WIDTH, TOKENS = 2, 4, 3
HEADS: dict[str, Callable[[], DraftHead]] = {
    "lattice": lambda: LatticeHead(candidates=2, hidden_size=4, num_layers=1, num_heads=2, factor_dim=4),
    "selector": lambda: SelectorHead(candidates=2, rank=3),
}
WAYS: dict[str, Callable[[], tuple]] = {
    "chain, rejection": lambda: (SampledChain(), RejectionVerifier()),
    "chain, block": lambda: (SampledChain(), BlockVerifier()),
    "chain, match": lambda: (SampledChain(), MatchVerifier()),
    "tree, rejection": lambda: (SampledTree(branching=[2, 1]), RejectionVerifier()),
    "best-first tree, match": lambda: (BestFirstTree(budget=3), MatchVerifier()),
}


def proposer(name: str) -> Callable[[int], Scores]:
    """A head with random weights on one block of random hidden states, for as many rows as asked for."""
    generator = torch.Generator().manual_seed(3)
    head: Any = HEADS[name]()
    head.build(
        DraftConfig(hidden_size=WIDTH, vocab_size=TOKENS, block_size=DEPTH + 1, mask_token_id=0, rms_norm_eps=1e-6)
    )
    for weight in head.parameters():
        weight.data = 0.9 * torch.randn(weight.shape, generator=generator)
    if name == "lattice":
        head.lilicorr.scale = 1.5
    weight, embedding = (torch.randn(TOKENS, WIDTH, generator=generator) for _ in range(2))
    lm = LanguageHead(weight, embedding=embedding)
    rows = DEPTH + (1 if head.needs else 0)
    hidden = torch.randn(1, rows, WIDTH, generator=generator)

    def scores(count: int) -> Scores:
        with torch.no_grad():
            found = head.open(hidden.expand(count, -1, -1), torch.zeros(count, dtype=torch.long), lm)
        assert found.step is not None
        return replace(found, step=torch.no_grad()(found.step))

    return scores


def target(enumeration: ModuleType) -> Any:
    generator = torch.Generator().manual_seed(0)
    return enumeration.Table(
        lambda text: (0.7 * torch.randn(TOKENS, generator=generator)).softmax(-1).tolist(), TOKENS, DEPTH + 1
    )


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_law_of_the_target(enumeration: ModuleType, head: str, way: str) -> None:
    outcome = enumeration.Play(target(enumeration), proposer(head), *WAYS[way]()).outcome()
    assert outcome.gap < 1e-6
    assert min(outcome.accepted) > 0.01, "some length is hardly ever accepted: little is tested"


@pytest.mark.parametrize("head", HEADS)
def test_declaring_the_base_law_over_the_same_candidates_is_found(enumeration: ModuleType, head: str) -> None:
    scores = proposer(head)

    def as_base(draft: Draft) -> Draft:
        first = scores(len(draft.tokens))
        return replace(draft, law=Law(first.logits.softmax(-1), first.ids))

    play = enumeration.Play(target(enumeration), scores, SampledChain(), RejectionVerifier(), change=as_base)
    assert play.outcome().gap > 0.01
