"""Trees for heads whose laws depend on tokens: grown depth by depth, or read from a table."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from dflash_lightning.decoding.builder import BestFirstTree, DraftBuilder, LayerTree, ReachTree, TableTree
from dflash_lightning.decoding.builder.grow import Pool
from dflash_lightning.decoding.decoder import SpeculativeDecoder
from dflash_lightning.decoding.noise import Noise
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec
from dflash_lightning.decoding.types import Draft, Round, Scores
from dflash_lightning.decoding.verifier import MatchVerifier
from dflash_lightning.head import MarkovHead
from dflash_lightning.testing import check_builder

GREEDY = Sampler(SamplingSpec(), Noise(0))
# Toy C: child logits are a row of the depth plus a row of the parent's token.
BASE = torch.tensor([[1.0, 0.5, 0.0], [0.8, 0.6, 0.2], [0.3, 0.9, 0.1]])
AFTER = torch.tensor([[0.0, 1.0, -0.5], [0.8, -0.4, 0.2], [-0.3, 0.3, 0.6]])
LAWS = (BASE[:, None] + AFTER).softmax(-1)  # depth, parent, token


def toy(rows: int = 1, **changes: object) -> Scores:
    """The toy as a proposer; like a Markov head it has no state."""

    def step(state: object, tokens: Tensor, depth: int) -> tuple[Scores, object]:
        return Scores(BASE[depth] + AFTER[tokens]), state

    return Scores(**{"logits": BASE.expand(rows, -1, -1), "step": step, **changes})


def build(builder: DraftBuilder, scores: Scores) -> Draft:
    rows = torch.arange(len(scores.logits))
    return builder.build(torch.zeros_like(rows), scores, Round(rows, torch.zeros_like(rows), 0), GREEDY)


def nodes_of(draft: Draft, row: int = 0) -> list[tuple[int, int, int]]:
    """Token, depth and parent of the live nodes but the root."""
    live = draft.live[row, 1:]
    columns = (draft.tokens, draft.depth, draft.parents)
    return list(zip(*(column[row, 1:][live].tolist() for column in columns), strict=True))


def paths_of(nodes: list[tuple[int, int, int]]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [(0,)]
    for token, _, parent in nodes:
        paths.append((*paths[parent], token))
    return paths[1:]


def mass(path: tuple[int, ...]) -> float:
    """The probability of a path under the toy's own laws; its first entry is the root."""
    product = 1.0
    for depth in range(len(path) - 1):
        product *= float(LAWS[depth, path[depth], path[depth + 1]])
    return product


# The six likeliest nodes: token, depth, parent, probability of the path.
SIX = [
    (1, 1, 0, 0.574097),
    (0, 2, 1, 0.370914),
    (0, 1, 0, 0.348207),
    (1, 3, 2, 0.284846),
    (1, 2, 3, 0.217780),
    (2, 2, 1, 0.111717),
]

# --- grown depth by depth -------------------------------------------------------------------------------------------


def test_the_toy_has_the_known_laws() -> None:
    expected = {(0, 0): (0.348207, 0.574097, 0.077696), (1, 1): (0.646082, 0.159322, 0.194596)}
    expected |= {(2, 0): (0.155048, 0.767958, 0.076995), (2, 2): (0.157881, 0.524185, 0.317934)}
    for (depth, parent), law in expected.items():
        assert LAWS[depth, parent].tolist() == pytest.approx(law, abs=1e-6)
    chain = [mass((0, 1)), mass((0, 1, 0)), mass((0, 1, 0, 1))]
    assert sum(chain) == pytest.approx(1.229857, abs=1e-6)


def test_two_lanes_of_all_children_give_the_known_tree() -> None:
    """PCTree, k = 2, six nodes; the pool has k + (depths - 1) k^2 = 10 candidates."""
    found = nodes_of(build(LayerTree(budget=6, width=2, branch=2, pool_all=True), toy()))
    assert found == [node[:3] for node in SIX]
    assert [mass(path) for path in paths_of(found)] == pytest.approx([node[3] for node in SIX], abs=1e-6)
    draft = build(LayerTree(budget=20, width=2, branch=2, pool_all=True), toy())
    assert int(draft.live.sum()) == 11 and draft.tokens.shape == (1, 21)


@pytest.mark.parametrize(
    ("budget", "beam", "best"), [(8, None, None), (9, 2.174223, 2.205873), (10, 2.231732, 2.283569)]
)
def test_a_beam_equals_the_best_tree_until_it_loses(budget: int, beam: float | None, best: float | None) -> None:
    beamed = nodes_of(build(LayerTree(budget=budget, width=2, branch=2, pool_all=True), toy()))
    exact = nodes_of(build(BestFirstTree(budget=budget), toy()))
    if beam is None:
        assert beamed == exact
    else:
        assert sum(map(mass, paths_of(beamed))) == pytest.approx(beam, abs=1e-6)
        assert sum(map(mass, paths_of(exact))) == pytest.approx(best, abs=1e-6)


def test_the_control_experiment_in_miniature() -> None:
    """True probability of six nodes: by paths, by the greedy chain's laws shared by all parents, by the first look."""
    shared = torch.stack([LAWS[0, 0], LAWS[1, 1], LAWS[2, 0]]).log()[None]
    found = {
        "paths": paths_of(nodes_of(build(LayerTree(budget=6, width=6), toy()))),
        "shared": paths_of(nodes_of(build(BestFirstTree(budget=6), Scores(shared)))),
        "first look": paths_of(nodes_of(build(BestFirstTree(budget=6), Scores(BASE[None])))),
    }
    true = {name: sum(map(mass, paths)) for name, paths in found.items()}
    assert true == pytest.approx({"paths": 1.907561, "shared": 1.751067, "first look": 1.686548}, abs=1e-6)


def test_one_lane_is_the_chain_and_many_are_the_best_tree() -> None:
    chain = nodes_of(build(LayerTree(width=1, branch=1, pool_all=True), toy()))
    assert chain == [(1, 1, 0), (0, 2, 1), (1, 3, 2)]
    for budget in (1, 5, 12, 39):
        wide = LayerTree(budget=budget, width=budget, branch=budget)
        assert nodes_of(build(wide, toy())) == nodes_of(build(BestFirstTree(budget=budget), toy()))


# DARTree: the first depth by the first look, then two candidates per slot, the law normalised over them.
FIXED = [(0, 1, 0, 0.506480), (1, 1, 0, 0.307196), (1, 2, 1, 0.349459), (0, 2, 2, 0.246428), (0, 3, 3, 0.225630)]
FIXED += [(1, 3, 4, 0.205032)]


def two_candidates(**settings: object) -> LayerTree:
    return LayerTree(**{"candidates": 2, "normaliser": "candidates", "prefix_depths": 1, **settings})


def test_equal_shares_per_depth_give_the_known_tree() -> None:
    """Two nodes per depth; all of them are kept, so they are compared by place, best first within the tree."""
    draft = build(two_candidates(budget=6), toy())
    found = {path: None for path in paths_of(nodes_of(draft))}
    expected = paths_of([node[:3] for node in FIXED])
    assert found.keys() == set(expected)
    assert two_candidates(budget=6)._widths(6, 3) == [2, 2, 2] and two_candidates()._widths(7, 3) == [3, 2, 2]
    assert two_candidates()._widths(2, 4) == [1, 1]


@pytest.mark.parametrize(
    ("normaliser", "expected"),
    [
        ("candidates", [0.506480, 0.307196, 0.349459, 0.246428, 0.225630, 0.205032]),
        ("vocabulary", [0.506480, 0.307196, 0.316769, 0.198474, 0.158532, 0.152419]),
    ],
)
def test_the_law_of_candidates_is_normalised_over_them_or_over_all(normaliser, expected, monkeypatch) -> None:
    pools: list[Pool] = []
    best = Pool.best
    monkeypatch.setattr(Pool, "best", lambda self, budget: pools.append(self) or best(self, budget))
    build(two_candidates(budget=6, normaliser=normaliser), toy())
    assert pools[0].values[0].exp().tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("bonus", [0.0, -0.2])
def test_pruned_trees_have_the_known_nodes(bonus: float) -> None:
    draft = build(two_candidates(budget=5, width=3, depth_bonus=bonus), toy())
    assert set(paths_of(nodes_of(draft))) == set(paths_of([node[:3] for node in FIXED[:5]]))


def test_a_bonus_by_depth_prefers_the_shallow() -> None:
    """Scores -.5, -.6, -1 and -.85 at depths 1, 2, 1 and 3; the third of three is the last by scores alone."""
    for bonus, kept in ((0.0, [0, 1, 3]), (-0.2, [0, 1, 2])):
        depths = torch.tensor([[1.0, 2.0, 1.0, 3.0]])
        values = torch.tensor([[-0.5, -0.6, -1.0, -0.85]]) + bonus * depths
        pool = Pool(values, torch.arange(4)[None], torch.tensor([[0, 1, 0, 2]]))
        assert sorted(pool.best(3)[0][0].tolist()) == kept


def test_no_correction_and_all_candidates_are_the_tree_of_the_first_look() -> None:
    logits = 2 * torch.randn(3, 3, 6, generator=torch.Generator().manual_seed(1))
    for builder in (
        LayerTree(budget=9, width=9, candidates=6, normaliser="candidates"),
        LayerTree(budget=9, width=9, prefix_depths=3),
        TableTree(budget=9, parents=6, branch=6),
        TableTree(budget=9, parents=9, branch=9),
    ):
        draft, best = build(builder, Scores(logits)), build(BestFirstTree(budget=9), Scores(logits))
        for row in range(3):
            assert nodes_of(draft, row) == nodes_of(best, row), builder.settings()


# --- read from a table ----------------------------------------------------------------------------------------------


def test_a_table_of_two_parents_gives_the_known_tree() -> None:
    found = nodes_of(build(TableTree(budget=7, parents=2, branch=2), toy()))
    assert found == [*(node[:3] for node in SIX), (0, 3, 5)]
    assert mass(paths_of(found)[-1]) == pytest.approx(0.108991, abs=1e-6)
    assert sum(map(mass, paths_of(found))) == pytest.approx(2.016552, abs=1e-6)


def test_a_child_without_a_law_after_it_is_a_leaf() -> None:
    """One parent per slot, by the first look (0, 0, 1): token 1 at depth 1 is likelier, and has no children."""
    found = nodes_of(build(TableTree(budget=7, parents=1, branch=2), toy()))
    assert found == [(1, 1, 0), (0, 1, 0), (1, 2, 2), (0, 2, 2), (1, 3, 4), (0, 3, 4)]
    known = [0.574097, 0.348207, 0.217780, 0.097855, 0.075148, 0.015172]
    assert [mass(path) for path in paths_of(found)] == pytest.approx(known, abs=1e-6)


def test_a_head_with_a_state_has_no_table() -> None:
    with pytest.raises(ValueError, match=r"decoding\.builder: TableTree .* keeps a state along a path. Use a builder"):
        build(TableTree(budget=3), toy(state=torch.zeros(1, 1)))


def test_candidates_of_each_slot_give_the_targets_ids() -> None:
    ids = torch.tensor([7, 3, 11])
    slots = torch.stack([ids, ids + 20, ids + 40])[None]

    def step(state: object, tokens: Tensor, depth: int) -> tuple[Scores, object]:
        place = (tokens[..., None] - 20 * max(depth - 1, 0) == ids).long().argmax(-1)
        laws = BASE[depth] + (AFTER[0] if depth == 0 else AFTER[place])
        return Scores(laws.expand(*tokens.shape, 3), slots[:, depth, None].expand(*tokens.shape, 3)), state

    for builder in (TableTree(budget=7, parents=2, branch=2), LayerTree(budget=7, width=3, branch=3, candidates=2)):
        plain, mapped = build(builder, toy()), build(builder, toy(ids=slots, step=step))
        assert torch.equal(plain.parents, mapped.parents)
        expected = ids[plain.tokens[:, 1:]] + 20 * (plain.depth[:, 1:] - 1)
        assert torch.equal(mapped.tokens[:, 1:][:, plain.live[0, 1:]], expected[:, plain.live[0, 1:]])


# --- by reach and cost ----------------------------------------------------------------------------------------------


def test_reach_per_cost_orders_the_nodes_and_keeps_their_ancestors() -> None:
    """At a flat cost the six likeliest; shallow nodes before dear depths; what is hardly reached is left out."""
    assert nodes_of(build(ReachTree(budget=6, branch=3), toy())) == [node[:3] for node in SIX]
    dear = build(ReachTree(budget=6, branch=3, depth_cost=5.0), toy())
    assert sorted(dear.depth[0, 1:].tolist()) == [1, 1, 1, 2, 2, 3]
    cut = build(ReachTree(budget=39, branch=3, threshold=0.2), toy())
    assert cut.tokens.shape == (1, 6) and nodes_of(cut) == [node[:3] for node in SIX if node[3] >= 0.2]
    two = build(ReachTree(budget=20, branch=2, pool=12), toy())  # two lanes per depth
    assert nodes_of(two) == nodes_of(build(LayerTree(budget=20, width=2, branch=2, pool_all=True), toy()))


# --- the contract, and the law of the text ---------------------------------------------------------------------------

BUILDERS = {
    "all children": LayerTree(budget=5, width=2, branch=2, pool_all=True),
    "pruned candidates": LayerTree(
        budget=5, width=3, candidates=3, depth_bonus=-0.2, normaliser="candidates", prefix_depths=1
    ),
    "equal shares": LayerTree(budget=5),
    "table": TableTree(budget=5, parents=3, branch=3),
    "small table": TableTree(budget=5, parents=1, branch=2),
    "reach": ReachTree(budget=5, branch=3, depth_cost=0.3),
    "reach, cut": ReachTree(budget=6, branch=2, pool=16, node_cost=0.1, threshold=0.1),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_the_contract_holds_and_the_law_is_the_targets(enumeration, name: str) -> None:
    builder = BUILDERS[name]
    check_builder(builder)
    again = DraftBuilder.from_settings(builder.name, builder.settings())
    assert type(again) is type(builder) and again.settings() == builder.settings()
    parts = enumeration.Play(enumeration.long_memory(4), toy, builder, MatchVerifier())
    outcome = parts.outcome()
    assert outcome.gap < 1e-6 and outcome.mean_accepted > 0.3


def test_nodes_under_the_wrong_parent_are_noticed(enumeration) -> None:
    """A tree that hangs a node under its parent's sibling is judged by the laws of another path than its own."""
    parts = enumeration.Play(enumeration.long_memory(4), toy, BUILDERS["all children"], MatchVerifier())

    def look(draft: Draft, target) -> Tensor:
        moved = torch.where(draft.parents == 1, 3, torch.where(draft.parents == 3, 1, draft.parents))
        return target(enumeration.node_texts(Draft(draft.tokens, "delta", parents=moved.clamp_max(3))))

    parts.look = look
    assert parts.outcome().gap > 0.01


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_greedy_text_is_the_targets_own(family: str, make_target, make_draft, plain_generate) -> None:
    """With a Markov head that corrects a lot; alone, and three prompts of different lengths together."""
    target = make_target(family)
    draft, prompts = make_draft(target), [[65, 66, 67, 68, 69], [70, 71], [72, 73, 74]]
    expected = [plain_generate(target, prompt, 7, ()) for prompt in prompts]
    head = MarkovHead(rank=8)
    head.build(draft.config)
    torch.nn.init.normal_(head.previous.weight, std=1.0)
    torch.nn.init.normal_(head.following.weight, std=1.0)
    draft.head = head
    names = BUILDERS if family == "qwen3" else ("all children", "small table")  # the mask has a window here
    for builder in (BUILDERS[name] for name in names):
        for some in (prompts[:1], prompts):
            decoder = SpeculativeDecoder(
                target, draft, builder=builder, max_length=40, batch_size=len(some), compile=False, prepacked=False
            )
            found = decoder.decode(some, max_new_tokens=7, stop_ids=())
            assert [generation.output_ids for generation in found.generations] == expected[: len(some)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerTree(budget=0), r"decoding\.builder\.budget: 0 leaves no draft"),
        (lambda: LayerTree(width=0), r"decoding\.builder\.width: 0 leaves no draft. Use 1 or more, or null"),
        (lambda: LayerTree(depth_bonus=0.1), r"decoding\.builder\.depth_bonus: 0\.1 lets a node beat its parent"),
        (lambda: LayerTree(normaliser="all"), r"decoding\.builder\.normaliser: 'all' is unknown. Use one of"),
        (lambda: LayerTree(prefix_depths=-1), r"decoding\.builder\.prefix_depths: -1 is no number of depths"),
        (lambda: ReachTree(pool=0), r"decoding\.builder\.pool: 0 leaves no draft"),
        (lambda: ReachTree(threshold=-0.1), r"decoding\.builder\.threshold: -0\.1 is not 0 or more"),
        (lambda: TableTree(parents=0), r"decoding\.builder\.parents: 0 leaves no draft"),
    ],
)
def test_trees_without_drafts_are_refused(make, message: str) -> None:
    with pytest.raises((ValueError, TypeCheckError)) as caught:  # the shape hook, where it is on, knows allowed words
        make()
    assert isinstance(caught.value, TypeCheckError) or re.match(message, str(caught.value))


def test_every_path_of_the_toy_is_a_path() -> None:
    assert sum(mass((0, *path)) for path in itertools.product(range(3), repeat=3)) == pytest.approx(1.0)
