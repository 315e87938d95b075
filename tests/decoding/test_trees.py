"""Trees of drafts: which nodes they have, which of them stand, and that the text is the target's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from dflash_lightning.decoding.builder import (
    BestChain,
    BestFirstTree,
    CostTree,
    DraftBuilder,
    LayerTree,
    ReachTree,
    SampledChain,
    SampledTree,
    TableTree,
)
from dflash_lightning.decoding.builder.grow import grow
from dflash_lightning.decoding.choice import named_part
from dflash_lightning.decoding.cost import CostTable
from dflash_lightning.decoding.decoder import SpeculativeDecoder
from dflash_lightning.decoding.law import Law
from dflash_lightning.decoding.loop import decode_batch
from dflash_lightning.decoding.noise import Noise
from dflash_lightning.decoding.policy import WidthPolicy
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec
from dflash_lightning.decoding.stats import DecodeStats
from dflash_lightning.decoding.types import Draft, Round, Scores
from dflash_lightning.decoding.verifier import MatchVerifier, RejectionVerifier

# Laws of three slots over four tokens, and the ten best nodes: token, depth, parent, probability of the path.
M = torch.tensor([[0.58, 0.26, 0.11, 0.05], [0.46, 0.39, 0.10, 0.05], [0.71, 0.15, 0.09, 0.05]])
BEST = [
    (0, 1, 0, 0.58),
    (0, 2, 1, 0.2668),
    (1, 1, 0, 0.26),
    (1, 2, 1, 0.2262),
    (0, 3, 2, 0.189428),
    (0, 3, 4, 0.160602),
    (0, 2, 3, 0.1196),
    (2, 1, 0, 0.11),
    (1, 2, 3, 0.1014),
    (0, 3, 7, 0.084916),
]
GREEDY = Sampler(SamplingSpec(), Noise(0))
WARM = Sampler(SamplingSpec(temperature=1.0), Noise(0))


def round_of(rows: int, position: int = 0) -> Round:
    return Round(torch.arange(rows), torch.full((rows,), position), 0)


def build(builder: DraftBuilder, logits: Tensor, sampler: Sampler = GREEDY, **scores: object) -> Draft:
    rows = len(logits)
    return builder.build(torch.full((rows,), 9), Scores(logits, **scores), round_of(rows), sampler)


def nodes_of(draft: Draft, row: int = 0) -> list[tuple[int, int, int]]:
    """Token, depth and parent of the live nodes but the root."""
    live = draft.live[row, 1:]
    columns = (draft.tokens, draft.depth, draft.parents)
    return list(zip(*(column[row, 1:][live].tolist() for column in columns), strict=True))


# --- the best tree --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 4, 10])
def test_the_best_nodes_come_in_the_known_order(budget: int) -> None:
    """``budget`` counts nodes, the root comes on top: a tree of 10 is verified as 11 tokens."""
    builder = BestFirstTree(budget=budget)
    draft = build(builder, M.log()[None])
    assert nodes_of(draft) == [node[:3] for node in BEST[:budget]]
    assert draft.tokens.shape == (1, budget + 1) and builder.num_nodes(3) == budget
    assert draft.tokens[0, 0] == 9 and draft.drawn == "delta" and draft.live.all()


def test_it_is_the_best_tree_of_its_size() -> None:
    """Against all 84 paths, and whatever is added to a row of logits."""
    for seed in range(5):
        logits = 2 * torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(seed))
        draft = build(BestFirstTree(budget=20), logits + torch.tensor([5.0, -3.0, 0.0])[:, None])
        laws = logits[0].double().softmax(-1).tolist()
        product = {(): 1.0}
        for path in (p for n in (1, 2, 3) for p in itertools.product(range(4), repeat=n)):
            product[path] = product[path[:-1]] * laws[len(path) - 1][path[-1]]
        del product[()]
        paths: list[tuple[int, ...]] = [()]
        for token, _, parent in nodes_of(draft):
            paths.append((*paths[parent], token))
        assert len({*paths}) == 21
        assert {*paths[1:]} == {*sorted(product, key=product.get, reverse=True)[:20]}
        found = [product[path] for path in paths[1:]]
        assert found == sorted(found, reverse=True)
        assert sum(found) == pytest.approx(sum(sorted(product.values())[-20:]))


def test_among_equals_low_ranks_and_short_paths_come_first() -> None:
    """All tokens equally likely in two slots, certain in the third; equal tokens rank by their ids."""
    half = torch.tensor([[[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]]).log()
    assert nodes_of(build(BestFirstTree(budget=8), half)) == [
        (0, 1, 0),  # ranks (0)
        (1, 1, 0),  # (1)
        (0, 2, 1),  # (0, 0)
        (2, 3, 3),  # (0, 0, 0)
        (1, 2, 1),  # (0, 1)
        (2, 3, 5),  # (0, 1, 0)
        (0, 2, 2),  # (1, 0)
        (2, 3, 7),  # (1, 0, 0)
    ]


def test_a_null_budget_is_as_many_nodes_as_a_chain_has() -> None:
    draft = build(BestFirstTree(), M.log()[None])
    assert nodes_of(draft) == [node[:3] for node in BEST[:3]] and BestFirstTree().num_nodes(7) == 7


def test_nodes_beyond_all_paths_are_dead_and_hang_under_the_root() -> None:
    """Two slots of two tokens have six paths; impossible tokens are no nodes either."""
    for logits, count in ((torch.zeros(1, 2, 2), 6), (torch.tensor([[[0.0, -torch.inf], [0.0, 0.0]]]), 3)):
        draft = build(BestFirstTree(budget=9), logits)
        assert draft.live.sum() == count + 1 and draft.tokens.shape == (1, 10)
        assert not draft.parents[0, count + 1 :].any() and draft.live[0, : count + 1].all()


def test_reduced_vocabularies_and_candidates_of_each_slot_give_the_targets_ids() -> None:
    ids = torch.tensor([7, 3, 11, 5])
    of_slots = torch.stack([ids, ids + 20, ids + 40])[None]
    for builder, sampler in ((BestFirstTree(budget=6), GREEDY), (SampledTree(budget=6), WARM), (BestChain(), GREEDY)):
        plain = build(builder, M.log()[None], sampler)
        reduced = build(builder, M.log()[None], sampler, ids=ids)
        candidates = build(builder, M.log()[None], sampler, ids=of_slots)
        assert torch.isin(reduced.tokens[0, 1:], ids).all()
        if builder.drawn == "delta":  # draws hang on the ids
            assert reduced.tokens[0, 1:].tolist() == ids[plain.tokens[0, 1:]].tolist()
            offset = 20 * (plain.depth[0, 1:] - 1)
            assert candidates.tokens[0, 1:].tolist() == (ids[plain.tokens[0, 1:]] + offset).tolist()
        else:
            law = reduced.law.dense(12)
            torch.testing.assert_close(law[..., ids], M[None])
            assert float(law.sum()) == pytest.approx(3)
            assert torch.isin(candidates.tokens[0, 1:] - 20 * (candidates.depth[0, 1:] - 1), ids).all()


# --- grown depth by depth -------------------------------------------------------------------------------------------

# Child logits are a row of the depth plus a row of the parent's token.
BASE = torch.tensor([[1.0, 0.5, 0.0], [0.8, 0.6, 0.2], [0.3, 0.9, 0.1]])
AFTER = torch.tensor([[0.0, 1.0, -0.5], [0.8, -0.4, 0.2], [-0.3, 0.3, 0.6]])


def sequential(rows: int = 1) -> Scores:
    """The toy as a proposer with a step; its state counts depths, to see that lanes keep theirs."""

    def step(state: Tensor, tokens: Tensor, depth: int) -> tuple[Scores, Tensor]:
        assert (state == depth).all() and state.shape == tokens.shape
        return Scores(BASE[depth] + AFTER[tokens]), state + 1

    return Scores(BASE.expand(rows, -1, -1), state=torch.zeros(rows, 1), step=step)


def test_trees_of_a_sequential_law_are_the_best_under_it() -> None:
    """Budget 6: the true mass of the nodes is 1.907561; under marginals it would be 1.686548."""
    draft = BestFirstTree(budget=6).build(torch.tensor([0]), sequential(), round_of(1), GREEDY)
    product, laws = {(0,): 1.0}, (BASE[:, None] + AFTER).softmax(-1)  # depth, parent, token
    for path in ((0, *p) for n in (1, 2, 3) for p in itertools.product(range(3), repeat=n)):
        product[path] = product[path[:-1]] * float(laws[len(path) - 2, path[-2], path[-1]])
    paths = [(0,)]
    for token, _, parent in nodes_of(draft):
        paths.append((*paths[parent], token))
    assert sum(product[path] for path in paths[1:]) == pytest.approx(1.907561, abs=1e-6)
    del product[(0,)]
    assert paths[1:] == sorted(product, key=product.get, reverse=True)[:6]


def test_growing_gives_the_heaps_tree() -> None:
    """Any laws, where no two paths are equally likely; and rows of a batch do not know of each other."""
    logits = 2 * torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    for budget in (1, 3, 12, 40):
        heap = build(BestFirstTree(budget=budget), logits)
        pool = grow(torch.zeros(4, dtype=torch.long), Scores(logits), widths=[budget] * 3, branch=budget)
        tokens, parents, live = pool.best(budget)
        assert live.all()
        assert torch.equal(tokens, heap.tokens[:, 1:]) and torch.equal(parents, heap.parents[:, 1:])


def test_chains_follow_a_sequential_law() -> None:
    """Greedy chain 1, 0, 1; a drawn one is drawn from the laws that it declares."""
    assert BestChain().build(torch.tensor([0]), sequential(), round_of(1), GREEDY).tokens.tolist() == [[0, 1, 0, 1]]
    n = 50
    draft = SampledChain().build(torch.zeros(n, dtype=torch.long), sequential(n), round_of(n), WARM)
    expected = (BASE + AFTER[draft.tokens[:, :-1]]).softmax(-1)
    torch.testing.assert_close(draft.law.dense(3), expected)
    assert len(draft.tokens[:, 1:].unique(dim=0)) > 10


def test_sampled_trees_of_a_sequential_law_declare_the_law_of_every_node() -> None:
    n = 20
    for builder in (SampledTree(branching=[2, 2, 1]), SampledTree(budget=9)):
        draft = builder.build(torch.zeros(n, dtype=torch.long), sequential(n), round_of(n), WARM)
        inner = (draft.parents[..., None, :] == torch.arange(draft.tokens.shape[1])[:, None]).any(-1)
        expected = (BASE[draft.depth.clamp_max(2)] + AFTER[draft.tokens]).softmax(-1)
        law = draft.law.dense(3).gather(1, draft.law_row[..., None].expand(-1, -1, 3))
        torch.testing.assert_close(law[inner], expected[inner])
        assert draft.live.all() or builder.budget


# --- sampled trees --------------------------------------------------------------------------------------------------


def test_a_tree_with_one_child_everywhere_is_the_chain() -> None:
    logits = torch.randn(6, 3, 8, generator=torch.Generator().manual_seed(0))
    tree, chain = build(SampledTree(branching=[1, 1, 1]), logits, WARM), build(SampledChain(), logits, WARM)
    assert torch.equal(tree.tokens, chain.tokens) and torch.equal(tree.law.mass, chain.law.mass)
    target = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(1))
    target[:, :3] = 0.7 * logits + 0.3 * target[:, :3]
    for verifier in (MatchVerifier(), RejectionVerifier()):
        one = verifier.verify(tree, target, round_of(6), WARM)
        other = verifier.verify(chain, target, round_of(6), WARM)
        assert torch.equal(one.accepted, other.accepted) and torch.equal(one.following, other.following)
        assert torch.equal(one.path, torch.arange(4).expand(6, 4) * (torch.arange(4) <= one.accepted[:, None]))
        assert torch.equal(one.offered, (one.accepted + 1).clamp_max(3))
        assert len(one.accepted.unique()) > 1


@pytest.mark.parametrize("settings", [{"branching": [3, 2, 1]}, {"budget": 12}], ids=str)
def test_the_shape_does_not_hang_on_what_is_drawn(settings: dict) -> None:
    """The same laws in many rounds: other tokens, one shape, siblings different from one another."""
    logits = (2 * torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0))).expand(40, -1, -1)
    builder = SampledTree(**settings)
    draft = build(builder, logits, WARM)
    assert draft.tokens.shape[1] - 1 == builder.num_nodes(3) == (15 if "branching" in settings else 12)
    for column in (draft.parents, draft.live, draft.depth):
        assert (column == column[0]).all()
    assert len(draft.tokens.unique(dim=0)) > 20
    for a, b in itertools.combinations(range(1, draft.tokens.shape[1]), 2):
        if draft.parents[0, a] == draft.parents[0, b]:
            assert (draft.tokens[:, a] != draft.tokens[:, b]).all()


def test_a_law_of_two_tokens_has_two_children() -> None:
    sampler = Sampler(SamplingSpec(temperature=1.0, top_k=2), Noise(0))
    draft = build(SampledTree(branching=[3, 3]), torch.randn(5, 2, 8), sampler)
    assert draft.live.sum(1).tolist() == [1 + 2 + 4] * 5
    parents_live = draft.live.gather(1, draft.parents)
    assert not (draft.live & ~parents_live).any()


# --- which nodes stand ----------------------------------------------------------------------------------------------


def hand_made(**changes: object) -> Draft:
    """Root 9; children 1, 2, 3; under 2 the children 4, 5; under 5 the child 6."""
    settings = {
        "tokens": torch.tensor([[9, 1, 2, 3, 4, 5, 6]]),
        "parents": torch.tensor([[0, 0, 0, 0, 2, 2, 5]]),
        "drawn": "delta",
        **changes,
    }
    return Draft(**settings)


@pytest.mark.parametrize(
    ("own", "dead", "accepted", "path", "following", "offered"),
    [
        ([2, 0, 5, 0, 0, 6, 8], [], 3, [0, 2, 5, 6], 8, 3),
        ([2, 0, 5, 0, 0, 7, 8], [], 2, [0, 2, 5], 7, 3),
        ([2, 0, 0, 0, 0, 6, 8], [], 1, [0, 2], 0, 2),
        ([7, 0, 5, 0, 0, 6, 8], [], 0, [0], 7, 1),
        ([3, 0, 5, 6, 0, 6, 8], [], 1, [0, 3], 6, 1),
        ([2, 0, 5, 0, 0, 6, 8], [6], 2, [0, 2, 5], 6, 2),
        ([2, 0, 5, 0, 0, 6, 8], [2, 4, 5, 6], 0, [0], 2, 1),
        ([2, 0, 5, 0, 0, 6, 8], [1, 2, 3, 4, 5, 6], 0, [0], 2, 0),
    ],
)
def test_the_walk_follows_the_targets_own_tokens(own, dead, accepted, path, following, offered) -> None:
    live = torch.ones(1, 7, dtype=torch.bool)
    live[0, dead] = False
    logits = torch.nn.functional.one_hot(torch.tensor([own]), 10).float()
    verdict = MatchVerifier().verify(hand_made(live=live), logits, round_of(1), GREEDY)
    assert int(verdict.accepted) == accepted and int(verdict.following) == following
    assert verdict.path[0, : accepted + 1].tolist() == path and int(verdict.offered) == offered
    assert verdict.path.shape == (1, 4)  # the draft is three deep
    law = Law(torch.full((1, 4, 10), 0.1))
    judged = RejectionVerifier().verify(hand_made(live=live, drawn="sampled", law=law), logits, round_of(1), GREEDY)
    for name in ("accepted", "following", "path", "offered"):
        assert torch.equal(getattr(judged, name), getattr(verdict, name)), name


def next_logits(text: list[int]) -> Tensor:
    """A target of ten tokens whose law hangs on its last three."""
    return _next_logits(tuple(text[-3:]))


@cache
def _next_logits(last: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(sum(31**i * token for i, token in enumerate(last)) + 7)
    return 2 * torch.randn(10, generator=generator)


def guess(row: int, text: list[int], index: int) -> Tensor:
    """A drafter of four slots that knows half of the target: its laws after the likeliest tokens, and noise."""
    generator = torch.Generator().manual_seed(1000 * row + index)
    ahead, laws = list(text), []
    for _ in range(4):
        laws.append(next_logits(ahead) + 1.5 * torch.randn(10, generator=generator))
        ahead.append(int(next_logits(ahead).argmax()))
    return torch.stack(laws)


PROMPTS = [[1, 2], [3], [4, 5, 6, 7]]


@pytest.fixture
def decode(table_target, scripted_proposer, make_parts) -> Callable[..., tuple[list[list[int]], DecodeStats]]:
    """``decode(builder, verifier="match", prompts=PROMPTS, stop_ids=(), **sampling)``; no builder decodes plainly."""

    def run(builder=None, verifier="match", prompts=PROMPTS, stop_ids=(), policy=None, **sampling):
        proposer = None if builder is None else scripted_proposer(4, guess)
        parts = make_parts(table_target(next_logits), proposer, verifier, builder=builder, policy=policy, **sampling)
        stats = DecodeStats(parts.proposer.num_drafts)
        requests = [PROMPTS.index(prompt) for prompt in prompts]
        found = decode_batch(parts, prompts, requests, max_new_tokens=30, stop_ids=stop_ids, stats=stats)
        return [generation.output_ids for generation in found], stats

    return run


def priced(seconds: list[float]) -> CostTree:
    """A tree of up to 8 nodes; ``seconds`` to judge one token and nine."""
    builder = CostTree(max_budget=8)
    builder.table = CostTable((1, 9), (0,), (tuple(seconds),), (1.0,))
    return builder


TREES = [BestFirstTree(budget=8), SampledTree(branching=[2, 2]), SampledTree(budget=6)]
# Of as many nodes as a round is worth, or as are likely enough: rounds differ.
NEWER = [
    priced([10.0, 20.0]),
    ReachTree(budget=9, branch=3, threshold=0.05),
    LayerTree(budget=8, width=3, branch=3, pool_all=True),
    TableTree(budget=8, parents=3, branch=3),
]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_k": 6, "seed": 3}], ids=["greedy", "sampling"])
def test_matched_trees_write_what_plain_decoding_writes(decode, sampling: dict) -> None:
    """Token for token, with keyed noise above temperature 0; ragged prompts, ended rows, stop tokens inside a path."""
    plain, _ = decode(**sampling)
    _, chain = decode(BestChain(), **sampling)
    for builder in [*TREES, *NEWER]:
        texts, stats = decode(builder, **sampling)
        assert texts == plain, builder.settings()
        assert all(stats.histogram[:3])
    alone = [decode(TREES[0], prompts=[prompt], **sampling) for prompt in PROMPTS]
    assert [texts[0] for texts, _ in alone] == plain
    assert sum(stats.tau for _, stats in alone) / 3 > chain.tau
    stop = plain[0][-1], plain[1][12]
    ended, _ = decode(stop_ids=stop, **sampling)
    assert len({len(text) for text in ended}) > 1
    for builder in [*TREES, *NEWER]:
        assert decode(builder, stop_ids=stop, **sampling)[0] == ended


class Width(WidthPolicy):
    """The round's number modulo 4."""

    name = "test_width_of_the_round"
    sees = "past"

    def width(self, draft: Draft, where: Round) -> Tensor:
        return torch.full_like(where.requests, where.index % 4)


def test_rounds_without_a_draft_are_plain_rounds(decode) -> None:
    """Where no node is worth its time, also with a policy that cuts."""
    for policy in (None, Width()):
        texts, stats = decode(priced([1.0, 1e6]), policy=policy)
        assert texts == decode()[0] and stats.tau == 1.0 and stats.drafted == 0


def test_cut_trees_write_what_plain_decoding_writes(decode) -> None:
    plain, _ = decode()
    for builder in [*TREES, *NEWER]:
        texts, stats = decode(builder, policy=Width())
        assert texts == plain and stats.histogram


@pytest.mark.parametrize(
    ("builder", "verifier"),
    [(SampledTree(branching=[2, 2]), "token"), (SampledChain(), "token"), (SampledChain(), "block")],
)
def test_rejection_at_temperature_0_is_the_longest_match(decode, builder, verifier) -> None:
    assert decode(builder, verifier)[0] == decode()[0]


def test_the_loop_writes_sampled_trees_as_often_as_the_target_would(
    table_target, scripted_proposer, make_parts, enumeration
) -> None:
    """Three tokens of 1500 requests, with real noise: chi-squared (26 df) below its 99.99 % point, 60.1."""
    n, target = 1500, enumeration.long_memory(3)
    proposer = scripted_proposer(2, lambda b, text, r: torch.tensor([[0.5, 0.2, 0.3], [0.3, 0.3, 0.4]]).log())
    parts = make_parts(
        table_target(lambda text: target(torch.tensor(text[1:4], dtype=torch.long)).log()),
        proposer,
        "token",
        builder=SampledTree(branching=[2, 2]),
        temperature=1.0,
        seed=4,
    )
    found = decode_batch(parts, [[0]] * n, list(range(n)), max_new_tokens=3, stop_ids=(), stats=DecodeStats(2))
    counts = torch.tensor([9 * a + 3 * b + c for a, b, c in (g.output_ids for g in found)]).bincount(minlength=27)
    expected = torch.tensor([n * p for _, p in sorted(target.continuations((), 3).items())])
    assert float(((counts - expected) ** 2 / expected).sum()) < 60.1


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BestFirstTree(budget=0), r"decoding\.builder\.budget: 0 leaves no draft. Use 1 or more"),
        (lambda: SampledTree(budget=-1), r"decoding\.builder\.budget: -1 leaves no draft"),
        (lambda: SampledTree(branching=[]), r"decoding\.builder\.branching: \[\] is no tree. .* for example"),
        (lambda: SampledTree(branching=[2, 0]), r"decoding\.builder\.branching: \[2, 0\] is no tree"),
        (lambda: SampledTree(budget=3, branching=[2]), r"both fix the shape .* Set one of them to null"),
    ],
)
def test_trees_without_drafts_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_builders_are_made_again_from_their_settings() -> None:
    for builder in (BestFirstTree(budget=5), SampledTree(branching=[2, 1]), SampledTree(budget=4), BestFirstTree()):
        again = DraftBuilder.from_settings(builder.name, builder.settings())
        assert type(again) is type(builder) and again.settings() == builder.settings()


# --- a real target --------------------------------------------------------------------------------------------------


def test_trees_on_a_transformers_target_write_what_it_generates(make_target, make_draft, plain_generate) -> None:
    """Greedy: ``transformers.generate``, in a ragged batch. With keyed noise: what is written without drafts."""
    target = make_target("qwen3")
    draft = make_draft(target)
    prompts, requests = [[65, 66, 67, 68, 69], [70, 71]], [4, 2]

    def decode(builder: DraftBuilder | None, verifier: str | None = None, **sampling: object) -> list[list[int]]:
        decoder = SpeculativeDecoder(
            target,
            None if builder is None else draft,
            sampling=SamplingSpec(**sampling),
            builder=builder,
            verifier=named_part("verifier", verifier),
            max_length=40,
            batch_size=2,
            compile=False,
            prepacked=False,
        )
        result = decoder.decode(prompts, max_new_tokens=12, stop_ids=(), request_ids=requests)
        return [generation.output_ids for generation in result.generations]

    assert decode(BestFirstTree(budget=9)) == [plain_generate(target, prompt, 12, ()) for prompt in prompts]
    sampling = {"temperature": 0.8, "top_p": 0.9, "seed": 1}
    plain = decode(None, **sampling)
    assert decode(BestFirstTree(budget=9), **sampling) == plain
    assert decode(SampledTree(branching=[2, 2, 1]), "match", **sampling) == plain
    assert len(decode(SampledTree(budget=7), **sampling)[0]) == 12
