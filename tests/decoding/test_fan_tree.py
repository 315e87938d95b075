"""Trees that grow by whole fans: the worked example, how wide fans are, and that the text is the target's own."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_lightning.decoding.builder import BestFirstTree, DraftBuilder, FanTree
from dflash_lightning.decoding.noise import Noise
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec
from dflash_lightning.decoding.types import Draft, Round, Scores
from dflash_lightning.decoding.verifier import MatchVerifier

# Laws of three slots over four tokens (MD 4), and the seven nodes of MD T6: token, parent, probability of the path.
M = torch.tensor([[0.58, 0.26, 0.11, 0.05], [0.46, 0.39, 0.10, 0.05], [0.71, 0.15, 0.09, 0.05]])
NODES = [
    (0, 0, 0.58),
    (1, 0, 0.26),
    (0, 1, 0.2668),
    (1, 1, 0.2262),
    (0, 3, 0.189428),
    (1, 3, 0.04002),
    (0, 2, 0.1196),
]


def build(builder: DraftBuilder, scores: Scores) -> Draft:
    rows = len(scores.logits)
    where = Round(torch.arange(rows), torch.zeros(rows, dtype=torch.long), 0)
    return builder.build(torch.full((rows,), 9), scores, where, Sampler(SamplingSpec(), Noise(0)))


def nodes_of(draft: Draft, row: int = 0) -> list[tuple[int, int]]:
    """Token and parent of the live nodes but the root."""
    live = draft.live[row, 1:]
    return list(zip(draft.tokens[row, 1:][live].tolist(), draft.parents[row, 1:][live].tolist(), strict=True))


def children_by_depth(draft: Draft) -> list[set[int]]:
    """Numbers of children of the nodes at each depth that have any."""
    live = draft.live[0]
    counts = torch.zeros(len(live), dtype=torch.long).index_add(0, draft.parents[0, 1:], live[1:].long())
    return [{*counts[(draft.depth[0] == depth) & live & (counts > 0)].tolist()} for depth in range(3)]


def test_the_nodes_of_the_worked_example_come_in_the_known_order() -> None:
    """Fans of two, eight nodes with the root; their mass is 1.682048, that of the best seven nodes 1.80263."""
    draft = build(FanTree(budget=7, fan=2), Scores(M.log()[None]))
    assert nodes_of(draft) == [node[:2] for node in NODES]
    assert draft.tokens[0, 0] == 9 and draft.tokens.shape == (1, 8) and draft.drawn == "delta"

    def mass(draft: Draft) -> float:
        reached = [1.0]
        for token, parent in nodes_of(draft):
            depth = int(draft.depth[0, len(reached)])
            reached.append(reached[parent] * float(M[depth - 1, token]))
        return sum(reached[1:])

    assert mass(draft) == pytest.approx(1.682048, abs=1e-6) == sum(node[2] for node in NODES)
    assert mass(build(BestFirstTree(budget=7), Scores(M.log()[None]))) == pytest.approx(1.80263, abs=1e-6)


def test_a_tree_of_all_paths_has_every_node_once_and_the_rest_is_dead() -> None:
    draft = build(FanTree(budget=100, fan=4), Scores(M.log()[None]))
    assert int(draft.live.sum()) == 1 + 4 + 16 + 64
    assert len({*nodes_of(draft)}) == 84, "siblings are distinct"
    assert not draft.parents[0, 85:].any() and draft.live[0, :85].all()
    impossible = torch.tensor([[[0.0, -torch.inf], [0.0, 0.0]]])
    assert nodes_of(build(FanTree(budget=9, fan=2), Scores(impossible))) == [(0, 0), (0, 1), (1, 1)]


def test_a_lead_narrows_the_fan() -> None:
    """MD T6: leads of .8023, .1651 and 1.5546 nats leave 2, 3 and 1 of four children; slope 0 leaves half."""
    assert children_by_depth(build(FanTree(budget=84, fan=4, gap_slope=1), Scores(M.log()[None]))) == [{2}, {3}, {1}]
    assert children_by_depth(build(FanTree(budget=84, fan=4, gap_slope=0), Scores(M.log()[None]))) == [{2}] * 3
    alone = torch.full((1, 3, 4), -torch.inf)
    alone[..., 2] = 0.0
    assert nodes_of(build(FanTree(budget=5, gap_slope=1), Scores(alone))) == [(2, 0), (2, 1), (2, 2)]


def test_measured_acceptance_narrows_the_fan() -> None:
    table = [[0.7, 0.2, 0.02], [0.5, 0.01, 0.0]]
    draft = build(FanTree(budget=84, fan=4, acceptance=table), Scores(M.log()[None]))
    assert children_by_depth(draft) == [{3}, {1}, {1}], "the third depth goes by the last row"
    capped = build(FanTree(budget=84, fan=2, acceptance=table), Scores(M.log()[None]))
    assert children_by_depth(capped)[0] == {2}
    none = build(FanTree(budget=84, acceptance=[[0.9, 0.9], [0.0]]), Scores(M.log()[None]))
    assert nodes_of(none) == [(0, 0), (1, 0)], "nothing is worth a node behind the first depth"


@pytest.mark.parametrize(
    "settings", [{"fan": 3}, {"fan": 2}, {"fan": 1}, {"fan": 4, "acceptance": [[1, 1, 1], [1, 1]]}]
)
@pytest.mark.parametrize("budget", [1, 5, 30])
def test_laws_asked_for_in_turn_give_the_same_tree(settings: dict[str, Any], budget: int) -> None:
    """Rows of a batch do not know of each other; ids of a reduced vocabulary go along."""
    logits, ids = 2 * torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 4, 7, 8, 11])

    def step(state: Tensor, tokens: Tensor, depth: int) -> tuple[Scores, Tensor]:
        assert (state == depth).all() and state.shape == tokens.shape
        return Scores(logits[:, depth, None].expand(-1, tokens.shape[1], -1), ids), state + 1

    builder = FanTree(budget=budget, **settings)
    at_once = build(builder, Scores(logits, ids))
    in_turn = build(builder, Scores(logits, ids, state=torch.zeros(4, 1), step=step))
    assert torch.isin(at_once.tokens[at_once.live][at_once.tokens[at_once.live] != 9], ids).all()
    for name in ("tokens", "parents", "live"):
        assert torch.equal(getattr(at_once, name), getattr(in_turn, name)), name


def test_it_follows_laws_that_depend_on_the_tokens_before() -> None:
    """A fan of one is the greedy chain; every child is a likely one after its own parent."""
    after = torch.tensor([[0.0, 1.0, -0.5], [0.8, -0.4, 0.2], [-0.3, 0.3, 0.6]])

    def step(state: None, tokens: Tensor, depth: int) -> tuple[Scores, None]:
        return Scores((depth + 1) * after[tokens.clamp(max=2)]), None

    scores = Scores(torch.zeros(1, 3, 3), step=step)
    assert nodes_of(build(FanTree(budget=3, fan=1), scores)) == [(2, 0), (2, 1), (2, 2)]
    draft = build(FanTree(budget=12, fan=2), scores)
    best = after.topk(2).indices.tolist()
    for token, parent in nodes_of(draft):
        assert token in best[min(int(draft.tokens[0, parent]), 2)]


@pytest.mark.parametrize(
    "settings", [{"fan": 2}, {"fan": 3, "gap_slope": 1.0}, {"fan": 3, "acceptance": [[1, 1], [1]]}]
)
def test_matched_trees_give_the_law_of_the_target(enumeration: ModuleType, settings: dict[str, Any]) -> None:
    laws = ((0.5, 0.2, 0.3), (0.15, 0.6, 0.25), (0.3, 0.3, 0.4))
    builder = FanTree(budget=5, **settings)
    play = enumeration.Play(enumeration.long_memory(), enumeration.marginals(laws), builder, MatchVerifier())
    outcome = play.outcome()
    assert outcome.gap < 1e-6 and outcome.mean_accepted > 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 0}, r"budget: 0 leaves no draft"),
        ({"fan": 0}, r"fan: 0 leaves no draft.*7"),
        ({"gap_slope": 1, "acceptance": [[1.0]]}, r"both say how wide a fan is.*Set one of them to null"),
        ({"acceptance": []}, r"acceptance: has no depth"),
    ],
)
def test_settings_that_make_no_tree_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FanTree(**settings)
