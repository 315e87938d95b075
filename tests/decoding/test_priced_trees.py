"""Trees whose size follows what nodes cost: the known sizes, the table that is measured, and the target's own text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from dflash_lightning.decoding.builder import BestFirstTree, CostTree, DraftBuilder, RooflineTree
from dflash_lightning.decoding.cost import CostBook, CostTable, Roofline, RoundTimer
from dflash_lightning.decoding.decoder import SpeculativeDecoder
from dflash_lightning.decoding.noise import Noise
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec
from dflash_lightning.decoding.types import Draft, Round, Scores
from dflash_lightning.decoding.verifier import MatchVerifier
from dflash_lightning.testing import check_builder, toy_target

M = torch.tensor([[0.58, 0.26, 0.11, 0.05], [0.46, 0.39, 0.10, 0.05], [0.71, 0.15, 0.09, 0.05]])
GREEDY = Sampler(SamplingSpec(), Noise(0))


def table_of(cost, most: int = 20) -> CostTable:
    """``cost(n)`` to judge a tree of ``n`` nodes and its root, and 4 before that."""
    return CostTable(tuple(range(1, most + 2)), (0,), (tuple(cost(n) for n in range(most + 1)),), (4.0,))


def linear(n: int) -> float:
    return 20 + 0.6 * n


def build(builder: DraftBuilder, rows: Tensor = M[None], position: int = 0) -> Draft:
    count = len(rows)
    where = Round(torch.arange(count), torch.full((count,), position), 0)
    return builder.build(torch.full((count,), 9), Scores(rows.log()), where, GREEDY)


def size(builder: DraftBuilder, *args: object) -> int:
    return build(builder, *args).tokens.shape[1] - 1


# --- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost", "stop", "nodes"),
    [
        (linear, "first", 11),
        (lambda n: 20 + 0.2 * n + 0.05 * n * n, "first", 8),
        (lambda n: 20 + 2.5 * max(n - 4, 0), "first", 4),
        (linear, "best", 11),
        (lambda n: 20 + 3 * -(-n // 4), "best", 12),
        (lambda n: 20.0, "first", 20),
        (lambda n: 20 + 1000.0 * n, "first", 0),
    ],
)
def test_the_tree_has_the_known_size(cost, stop: str, nodes: int) -> None:
    """Its nodes are the first ones of the best tree, whatever the size."""
    builder = CostTree(max_budget=20, stop=stop)
    builder.learn(table_of(cost), toy_target().facts, 1)
    draft, whole = build(builder), build(BestFirstTree(budget=20))
    assert draft.tokens.shape[1] == nodes + 1
    for name in ("tokens", "parents", "live"):
        assert torch.equal(getattr(draft, name), getattr(whole, name)[:, : nodes + 1])


def test_a_staircase_is_made_convex_for_the_first_stop() -> None:
    """On the steps themselves it would stop at 4, the end of the first one."""
    builder = CostTree(max_budget=20, stop="first")
    builder.learn(table_of(lambda n: 20 + 3 * -(-n // 4)), toy_target().facts, 1)
    assert 8 <= size(builder) <= 12


def test_a_batch_has_one_size_for_all_and_costs_grow_with_the_text() -> None:
    sure = torch.tensor([[0.97, 0.01, 0.01, 0.01]] * 3)
    builder = CostTree(max_budget=20)
    builder.learn(table_of(linear), toy_target().facts, 1)
    both, alone = build(builder, torch.stack([M, sure])), size(builder, sure[None])
    assert alone < both.tokens.shape[1] - 1 < 11 and both.live.all()
    steep = CostTable((1, 21), (0, 1000), ((20.0, 32.0), (20.0, 140.0)), (4.0, 4.0))
    builder.learn(steep, toy_target().facts, 1)
    assert size(builder) == 11 and 1 <= size(builder, M[None], 1000) < 4


def test_costs_that_are_not_known_yet_are_none() -> None:
    assert size(CostTree(max_budget=15)) == size(RooflineTree(max_budget=15)) == 15
    for builder in (CostTree(max_budget=15), RooflineTree(max_budget=15)):
        check_builder(builder)
        assert builder.num_nodes(7) == 15


def test_laws_that_depend_on_a_path_are_priced_too() -> None:
    base = torch.tensor([[1.0, 0.5, 0.0], [0.8, 0.6, 0.2], [0.3, 0.9, 0.1]])
    after = torch.tensor([[0.0, 1.0, -0.5], [0.8, -0.4, 0.2], [-0.3, 0.3, 0.6]])
    scores = Scores(base[None], step=lambda state, tokens, depth: (Scores(base[depth] + after[tokens]), None))
    builder, zero = CostTree(max_budget=12), torch.tensor([0])
    builder.learn(table_of(linear, 12), toy_target().facts, 1)
    draft = builder.build(zero, scores, Round(zero, zero, 0), GREEDY)
    whole = BestFirstTree(budget=12).build(zero, scores, Round(zero, zero, 0), GREEDY)
    assert 3 < draft.tokens.shape[1] < 13 and torch.equal(draft.tokens, whole.tokens[:, : draft.tokens.shape[1]])


# --- one size for many rounds ---------------------------------------------------------------------------------------


def test_the_mean_of_rounds_chooses_the_next_size_of_a_grid() -> None:
    """11 nodes are worth their time, 15 is the first size that is offered; until then every round has its own."""
    builder = CostTree(
        max_budget=20, branch=8, cost="line", plan="mean", rounds=2, grid=[15, 31, 47, 63, 95, 127], stop="first"
    )
    builder.learn(table_of(linear), toy_target().facts, 1)
    assert [size(builder) for _ in range(4)] == [11, 15, 15, 15]
    sure = torch.tensor([[[0.97, 0.01, 0.01, 0.01]] * 3])
    assert size(builder, sure) == 15  # decided
    plain = CostTree(max_budget=20, plan="mean", rounds=1)
    plain.learn(table_of(linear), toy_target().facts, 1)
    assert (size(plain), size(plain, sure)) == (11, 3)  # decided anew after every round
    capped = CostTree(max_budget=12, plan="mean", rounds=1, grid=[15])
    capped.learn(table_of(linear), toy_target().facts, 1)
    assert size(capped) == 12


# --- the roofline ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "nodes"),
    [({}, 11), ({"bucket": 4}, 8), ({"bucket": 16, "min_budget": 16}, 16), ({"min_budget": 14}, 14)],
    ids=str,
)
def test_sizes_are_cut_to_buckets_and_have_a_floor(settings: dict, nodes: int) -> None:
    class Line(Roofline):
        def seconds(self, most: int, context: float) -> list[float]:
            return [4 + linear(n) for n in range(most + 1)]

    builder = RooflineTree(max_budget=20, **settings)
    builder.roofline = Line(toy_target().facts, 1, (0.0, 0.0), (0.0, 0.0), 0.0)
    assert size(builder) == nodes


class LikeliestWalk(MatchVerifier):
    """Follows the target's likeliest tokens through the tree and draws the last one only, as one release does."""

    name = "test_likeliest_walk"

    def verify(self, draft: Draft, logits: Tensor, where: Round, sampler: Sampler):
        walked = super().verify(draft, logits, where, Sampler(SamplingSpec(), Noise(0)))
        last = walked.path.gather(1, walked.accepted[:, None])
        walked.following = sampler.draw(
            sampler.law(logits.gather(1, last[..., None].expand(-1, -1, logits.shape[-1]))),
            0,
            where.requests,
            where.positions[:, None],
        )[:, 0]
        return walked


def test_a_walk_along_the_likeliest_tokens_is_not_lossless(enumeration) -> None:
    """p = (.6, .4): the first token would always be 0, a distance of .4; the shipped walk has the target's law."""
    parts = enumeration.Play(
        enumeration.Table(lambda text: (0.6, 0.4), 2, 3),
        enumeration.marginals([(0.7, 0.3), (0.7, 0.3)]),
        RooflineTree(max_budget=4),
        MatchVerifier(),
    )
    assert parts.outcome().gap < 1e-6
    parts.verifier, parts.builder = LikeliestWalk(), RooflineTree(max_budget=1)
    found = parts.outcome()
    assert sum(p for text, p in found.texts.items() if text[0] == 0) == pytest.approx(1.0)
    assert found.gap == pytest.approx(0.4, abs=1e-6)


@pytest.mark.parametrize("rows", [((0.5, 0.2, 0.3), (0.15, 0.6, 0.25)), ((0.6, 0.4, 0.0), (0.0, 1.0, 0.0))], ids=str)
def test_the_law_of_the_text_is_the_targets_whatever_the_size(enumeration, rows) -> None:
    for builder in (CostTree(max_budget=6), CostTree(max_budget=6, plan="mean", rounds=2)):
        builder.learn(table_of(linear, 6), toy_target().facts, 1)
        parts = enumeration.Play(enumeration.long_memory(3), enumeration.marginals(rows), builder, MatchVerifier())
        outcome = parts.outcome()
        assert outcome.gap < 1e-6 and outcome.mean_accepted > 0.2


# --- measured -------------------------------------------------------------------------------------------------------


def test_costs_are_measured_once_and_kept_with_the_run(
    make_target, make_draft, plain_generate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy text is the target's own, alone and in a ragged batch; a second decoder reads what the first measured."""
    monkeypatch.setattr(CostBook, "known", {})
    target = make_target("qwen3")
    draft, prompts = make_draft(target), [[65, 66, 67, 68, 69], [70, 71], [72, 73, 74]]
    expected = [plain_generate(target, prompt, 7, ()) for prompt in prompts]
    asked: list[int] = []
    table = RoundTimer.table
    monkeypatch.setattr(
        RoundTimer, "table", lambda self, *a, **k: asked.append(self.batch_size) or table(self, *a, **k)
    )

    def decode(builder: DraftBuilder, some: list[list[int]]) -> list[list[int]]:
        decoder = SpeculativeDecoder(
            target,
            draft,
            builder=builder,
            max_length=40,
            batch_size=len(some),
            compile=False,
            prepacked=False,
        )
        result = decoder.decode(some, max_new_tokens=7, stop_ids=())
        decoder.decode(some[:1], max_new_tokens=1, stop_ids=())
        return [generation.output_ids for generation in result.generations]

    made = {"max_budget": 6, "repeats": 1, "folder": str(tmp_path)}
    for builder in (CostTree(**made), CostTree(**made, stop="best"), RooflineTree(**made)):
        assert decode(builder, prompts[:1]) == expected[:1]
        assert decode(builder, prompts) == expected
    assert sorted(asked) == [1, 1, 3, 3]  # the two kinds of builder look at different numbers of tokens
    entries = json.loads((tmp_path / "costs.json").read_text())
    assert len(entries) == 4 and {"machine", "target", "drafter", "batch_size"} <= entries[0]["place"].keys()
    assert entries[0]["table"]["nodes"] == [1, 2, 4, 7] and min(entries[0]["table"]["verify"][0]) > 0
    monkeypatch.setattr(CostBook, "known", {})  # another process
    assert decode(CostTree(**made), prompts) == expected and len(asked) == 4
    assert decode(CostTree(max_budget=6, repeats=1), prompts[:1]) == expected[:1]


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CostTree(max_budget=0), r"decoding\.builder\.max_budget: 0 is below 1. Use 1 or more"),
        (lambda: CostTree(stop="last"), r"decoding\.builder\.stop: 'last' is unknown. Use one of \['first', 'best'\]"),
        (lambda: CostTree(grid=[31, 15]), r"decoding\.builder\.grid: \[31, 15\] is no list of rising sizes"),
        (lambda: CostTree(repeats=0), r"decoding\.builder\.repeats: 0 is below 1"),
        (lambda: RooflineTree(min_budget=65), r"decoding\.builder\.max_budget: 64 is below 65. Use min_budget or more"),
        (lambda: RooflineTree(bucket=0), r"decoding\.builder\.bucket: 0 is below 1"),
    ],
)
def test_sizes_that_are_none_are_refused(make, message: str) -> None:
    with pytest.raises((ValueError, TypeCheckError)) as caught:  # the shape hook, where it is on, knows allowed words
        make()
    assert isinstance(caught.value, TypeCheckError) or re.match(message, str(caught.value))


def test_builders_are_made_again_from_their_settings() -> None:
    for builder in (CostTree(plan="mean", grid=[15], branch=8), RooflineTree(bucket=32, min_budget=32)):
        again = DraftBuilder.from_settings(builder.name, builder.settings())
        assert type(again) is type(builder) and again.settings() == builder.settings()
