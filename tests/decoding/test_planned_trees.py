"""Sampled trees of heads that know tokens: the shape is planned along likely paths, frozen, and filled with draws."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from dflash_lightning.decoding.builder import BestFirstTree, DraftBuilder, SampledTree
from dflash_lightning.decoding.builder.planned import plan_by_paths, shape_of
from dflash_lightning.decoding.decoder import SpeculativeDecoder
from dflash_lightning.decoding.law import Law
from dflash_lightning.decoding.noise import Noise
from dflash_lightning.decoding.paths import along_paths
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec
from dflash_lightning.decoding.types import Draft, Round, Scores
from dflash_lightning.decoding.verifier import MatchVerifier, RejectionVerifier
from dflash_lightning.head import MarkovHead
from dflash_lightning.testing import check_builder

WARM = Sampler(SamplingSpec(temperature=1.0), Noise(0))
BASE = torch.tensor([[1.0, 0.5, 0.0], [0.8, 0.6, 0.2], [0.3, 0.9, 0.1]])
AFTER = torch.tensor([[0.0, 1.0, -0.5], [0.8, -0.4, 0.2], [-0.3, 0.3, 0.6]])


def toy(rows: int) -> Scores:
    """Child logits are a row of the depth plus a row of the parent's token; the state counts depths."""

    def step(state: Tensor, tokens: Tensor, depth: int) -> tuple[Scores, Tensor]:
        assert (state == depth).all() and state.shape == tokens.shape
        return Scores(BASE[depth] + AFTER[tokens]), state + 1

    return Scores(BASE.expand(rows, -1, -1), state=torch.zeros(rows, 1), step=step)


def build(builder: DraftBuilder, rows: int = 40, sampler: Sampler = WARM) -> Draft:
    where = Round(torch.arange(rows), torch.zeros(rows, dtype=torch.long), 0)
    return builder.build(torch.zeros(rows, dtype=torch.long), toy(rows), where, sampler)


def test_the_plan_is_the_best_trees_ranks() -> None:
    """Of the six likeliest nodes, whose tokens are 1, 0, 0, 1, 1, 2; the plan keeps which child each one is."""
    shape = plan_by_paths(torch.tensor([0]), toy(1), 6, WARM)
    assert shape.parents[0].tolist() == [0, 0, 1, 0, 2, 3, 1]
    assert shape.ranks[0].tolist() == [0, 0, 0, 1, 0, 0, 1]
    assert shape.depths[0].tolist() == [0, 1, 2, 1, 3, 2, 2] and shape.height == 3
    best = build(BestFirstTree(budget=6), 1, Sampler(SamplingSpec(), Noise(0)))
    assert torch.equal(shape.parents, best.parents)


def test_a_plan_of_more_nodes_than_there_are_paths_is_filled_up() -> None:
    shape = plan_by_paths(torch.tensor([0, 0]), toy(2), 50, WARM)
    assert shape.parents.shape == (2, 51) and shape.live.sum(1).tolist() == [1 + 3 + 9 + 27] * 2
    shape = shape_of(torch.tensor([[0, 0, 0]]), torch.tensor([[True, False, False]]))
    assert shape.ranks.tolist() == [[0, 0, 0, 0]] and shape.height == 1


def test_the_shape_is_frozen_and_the_laws_are_those_of_the_draws() -> None:
    """The same laws in many rounds: other tokens, one shape; every inner node declares the law after its own path."""
    draft = build(SampledTree(budget=7, plan="paths"))
    for column in (draft.parents, draft.live, draft.depth):
        assert (column == column[0]).all()
    assert len(draft.tokens.unique(dim=0)) > 20
    inner = (draft.parents[..., None, :] == torch.arange(8)[:, None]).any(-1)
    expected = (BASE[draft.depth.clamp_max(2)] + AFTER[draft.tokens]).softmax(-1)
    law = draft.law.dense(3).gather(1, draft.law_row[..., None].expand(-1, -1, 3))
    torch.testing.assert_close(law[inner], expected[inner])


def test_without_laws_of_paths_both_plans_are_one() -> None:
    logits = torch.randn(5, 3, 6, generator=torch.Generator().manual_seed(0))
    where = Round(torch.arange(5), torch.zeros(5, dtype=torch.long), 0)
    roots = torch.zeros(5, dtype=torch.long)
    one, other = (SampledTree(budget=6, plan=p).build(roots, Scores(logits), where, WARM) for p in ("slots", "paths"))
    assert torch.equal(one.tokens, other.tokens) and torch.equal(one.parents, other.parents)


def mixture(count: int) -> Scores:
    """Two hidden cases with a law per slot each; the state of a lane is the posterior of the cases."""
    laws = torch.tensor([[[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]], [[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]]])

    def step(state: Tensor, tokens: Tensor, depth: int) -> tuple[Scores, Tensor]:
        if depth:
            state = state * laws[:, depth - 1, tokens].movedim(0, -1)
            state = state / state.sum(-1, keepdim=True)
        return Scores(torch.einsum("bwz,zv->bwv", state, laws[:, depth]).log()), state

    return Scores(laws.mean(0).log().expand(count, -1, -1), state=torch.full((count, 1, 2), 0.5), step=step)


@pytest.mark.parametrize(
    ("budget", "verifier"), [(2, RejectionVerifier), (4, RejectionVerifier), (5, RejectionVerifier), (2, MatchVerifier)]
)
def test_the_text_has_the_law_of_the_target(enumeration, budget: int, verifier) -> None:
    builder = SampledTree(budget=budget, plan="paths")
    outcome = enumeration.Play(enumeration.long_memory(3), mixture, builder, verifier()).outcome()
    assert outcome.gap < 1e-6 and outcome.mean_accepted > 0.3


class Unfilled(SampledTree):
    """The plan's own tokens, declared as draws: what a replay that forgot to draw would give."""

    name = "test_unfilled"

    def build(self, roots: Tensor, scores: Scores, where: Round, sampler: Sampler) -> Draft:
        drawn = super().build(roots, scores, where, sampler)
        planned = BestFirstTree(budget=self.budget).build(roots, scores, where, sampler)
        return replace(drawn, tokens=planned.tokens)


class Reshaped(SampledTree):
    """The shape follows the draws: the first child and what hangs under it are there only if it is not token 0."""

    name = "test_reshaped"

    def build(self, roots: Tensor, scores: Scores, where: Round, sampler: Sampler) -> Draft:
        drawn = super().build(roots, scores, where, sampler)
        live = drawn.live.clone()
        live[:, 1] &= drawn.tokens[:, 1] != 0
        return replace(drawn, live=along_paths(live, drawn.parents))


@pytest.mark.parametrize("mistake", [Unfilled, Reshaped])
def test_replays_that_are_not_frozen_draws_are_detected(enumeration, mistake: type) -> None:
    parts = enumeration.Play(enumeration.long_memory(3), mixture, mistake(budget=4, plan="paths"), RejectionVerifier())
    assert parts.outcome().gap > 0.01
    parts.verifier, parts.builder = MatchVerifier(), mistake(budget=2, plan="paths")
    assert parts.outcome().gap < 1e-6


def test_a_law_of_another_node_is_detected(enumeration) -> None:
    parts = enumeration.Play(enumeration.e3(), mixture, SampledTree(budget=4, plan="paths"), RejectionVerifier())
    parts.change = lambda draft: replace(draft, law=Law(mixture(len(draft.tokens)).logits.exp()), law_row=None)
    assert parts.outcome().gap > 0.001


@pytest.mark.parametrize("verifier", [MatchVerifier(), RejectionVerifier()])
def test_on_a_transformers_target(verifier, make_target, make_draft) -> None:
    """With keyed noise the text is plain decoding's, in a ragged batch; by rejection it is complete."""
    target = make_target("qwen3")
    draft = make_draft(target)
    head = MarkovHead(rank=8)
    head.build(draft.config)
    torch.nn.init.normal_(head.following.weight, std=1.0)
    draft.head = head
    prompts = [[65, 66, 67, 68, 69], [70, 71], [72, 73, 74]]

    def decode(some: list[list[int]], drafter: object, **parts: object) -> list[list[int]]:
        decoder = SpeculativeDecoder(
            target,
            drafter,
            sampling=SamplingSpec(temperature=0.8, seed=1),
            max_length=40,
            batch_size=len(some),
            compile=False,
            prepacked=False,
            **parts,
        )
        found = decoder.decode(some, max_new_tokens=8, stop_ids=())
        return [generation.output_ids for generation in found.generations]

    plain = decode(prompts, None)
    for some in (prompts[:1], prompts):
        found = decode(some, draft, builder=SampledTree(budget=7, plan="paths"), verifier=verifier)
        assert [len(text) for text in found] == [8] * len(some)
        if isinstance(verifier, MatchVerifier):
            assert found == plain[: len(some)]


def test_the_contract_and_the_settings() -> None:
    builder = SampledTree(budget=5, plan="paths")
    check_builder(builder)
    assert DraftBuilder.from_settings(builder.name, builder.settings()).settings() == builder.settings()
    with pytest.raises((ValueError, TypeCheckError)) as caught:  # the shape hook, where it is on, knows allowed words
        SampledTree(plan="tokens")
    message = r"decoding\.builder\.plan: 'tokens' is unknown. Use one of \['slots', 'paths'\]"
    assert isinstance(caught.value, TypeCheckError) or re.match(message, str(caught.value))
