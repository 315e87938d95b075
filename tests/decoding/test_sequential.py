"""Chains over laws that know the tokens drafted before: drawn in turn, each law declared as it was drawn from."""

from __future__ import annotations

import pytest
import torch

from dflash_lightning.decoding import law as laws
from dflash_lightning.decoding.builder import BestChain, SampledChain
from dflash_lightning.decoding.noise import Noise
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec
from dflash_lightning.decoding.types import Round
from dflash_lightning.types import Scores

ROOTS = torch.tensor([1, 4, 2])


def by_last_token(table: torch.Tensor, ids: torch.Tensor | None = None) -> Scores:
    """Laws ``table[depth, last token]``; the state counts the steps, and the signal is what the last token says."""

    def step(state: torch.Tensor, tokens: torch.Tensor, depth: int) -> tuple[Scores, torch.Tensor]:
        assert (state == depth).all(), "a state came from elsewhere"
        return Scores(table[depth][tokens], ids, {"last": tokens.float()}), state + 1

    first_look = torch.zeros(len(ROOTS), len(table), table.shape[-1])
    return Scores(first_look, ids, {"row": ROOTS.float()}, torch.zeros(len(ROOTS), 1), step)


def where() -> Round:
    return Round(torch.arange(len(ROOTS)), torch.zeros(len(ROOTS), dtype=torch.long), 3)


def sampler(**spec: float) -> Sampler:
    return Sampler(SamplingSpec(temperature=1.0, **spec), Noise(0))


@pytest.mark.parametrize("ids", [None, torch.tensor([0, 2, 3])])
def test_a_greedy_chain_is_the_likeliest_token_given_those_before(ids: torch.Tensor | None) -> None:
    table = torch.randn(4, 5, 5 if ids is None else 3)
    draft = BestChain().build(ROOTS, by_last_token(table, ids), where(), sampler())
    for b, root in enumerate(ROOTS.tolist()):
        expected = [root]
        for depth in range(4):
            best = int(table[depth, expected[-1]].argmax())
            expected.append(best if ids is None else int(ids[best]))
        assert draft.tokens[b].tolist() == expected
    assert torch.equal(draft.signals["last"], draft.tokens[:, :-1].float()), "one number per draft, [B, D]"
    assert torch.equal(draft.signals["row"], ROOTS.float())
    assert draft.law is None and draft.parents is None


@pytest.mark.parametrize("spec", [{}, {"top_k": 2}, {"top_p": 0.8}])
@pytest.mark.parametrize("ids", [None, torch.tensor([0, 2, 3, 4])])
def test_a_sampled_chain_declares_the_law_that_each_token_was_drawn_from(
    ids: torch.Tensor | None, spec: dict[str, float]
) -> None:
    table = torch.randn(4, 5, 5 if ids is None else 4)
    warp = sampler(**spec)
    draft = SampledChain().build(ROOTS, by_last_token(table, ids), where(), warp)
    assert draft.law is not None
    dense = draft.law.dense(5)
    for depth in range(4):
        expected = warp.law(table[depth][draft.tokens[:, depth]]).dense(table.shape[-1])
        found = dense[:, depth] if ids is None else dense[:, depth][:, ids]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
    assert bool((draft.law.of(draft.tokens[:, 1:]) > 0).all()), "a token was drawn that its law says is impossible"
    torch.testing.assert_close(dense.sum(-1), torch.ones(3, 4), rtol=0, atol=1e-6)


def test_tokens_of_a_chain_are_drawn_with_the_noise_of_their_slot() -> None:
    """Laws that know nothing of the tokens before give the chain that is drawn all at once, token for token."""
    table = torch.randn(4, 1, 5).expand(-1, 5, -1)
    at_once = Scores(table[:, 0].expand(len(ROOTS), -1, -1))
    chains = [SampledChain().build(ROOTS, scores, where(), sampler()) for scores in (by_last_token(table), at_once)]
    assert torch.equal(chains[0].tokens, chains[1].tokens)
    assert torch.equal(chains[0].law.mass, chains[1].law.mass)


@pytest.mark.parametrize("ids", [None, torch.arange(1, 9)])
def test_laws_of_different_widths_are_joined_without_loss(
    monkeypatch: pytest.MonkeyPatch, ids: torch.Tensor | None
) -> None:
    """A flat law needs all tokens for its nucleus, a peaked one is held by a few."""
    monkeypatch.setattr(laws, "_NUCLEUS", 3)
    peaked = torch.tensor([9.0, 0, 0, 0, 0, 0, 0, 0])
    table = torch.stack([torch.zeros(8), peaked, peaked.roll(5)])[:, None].expand(-1, 9, -1)
    warp = sampler(top_p=0.9)
    widths = {warp.law(row).mass.shape[-1] for row in table[:, :1]}
    assert widths == {3, 8}, "the laws have one width: nothing is tested"
    draft = SampledChain().build(ROOTS, by_last_token(table, ids), where(), warp)
    assert draft.law is not None and draft.law.ids is not None
    dense = draft.law.dense(9)
    for depth in range(3):
        expected = warp.law(table[depth, :1]).dense(8)[0]
        assert torch.equal(dense[0, depth, :8] if ids is None else dense[0, depth, 1:], expected)
