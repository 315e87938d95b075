"""What rounds cost: curves through measured times, tables, where a tree stops, and the file they are kept in."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from dflash_lightning.decoding.builder.best_first import best_tree
from dflash_lightning.decoding.builder.priced import worth
from dflash_lightning.decoding.cost import CostBook, CostTable, Roofline, best_stop, first_stop, rates
from dflash_lightning.decoding.cost.regression import not_negative, rising, rising_convex
from dflash_lightning.decoding.cost.roofline import amounts, two_lines
from dflash_lightning.decoding.cost.table import line_through
from dflash_lightning.decoding.types import Scores
from dflash_lightning.testing import toy_target

# Laws of three slots over four tokens (matrix M); its best paths have .58, .2668, .26, .2262, ...
M = torch.tensor([[0.58, 0.26, 0.11, 0.05], [0.46, 0.39, 0.10, 0.05], [0.71, 0.15, 0.09, 0.05]])
DRAFT = 4.0


def masses(most: int = 20) -> list[float]:
    _, found = best_tree(torch.tensor([9]), Scores(M.log()[None]), most)
    return found[0].tolist()


def linear(n: int) -> float:
    return DRAFT + 20 + 0.6 * n


def quadratic(n: int) -> float:
    return DRAFT + 20 + 0.2 * n + 0.05 * n * n


def hinge(n: int) -> float:
    return DRAFT + 20 + 2.5 * max(n - 4, 0)


def staircase(n: int) -> float:
    return DRAFT + 20 + 3 * -(-n // 4)


def curve(cost, most: int = 20) -> list[float]:
    return [cost(n) for n in range(most + 1)]


def table_of(cost, most: int = 20) -> CostTable:
    """``cost(n)`` is a whole round with ``n`` nodes, the drafts' 4 included; tables count the root."""
    nodes = tuple(range(1, most + 2))
    return CostTable(nodes, (0,), (tuple(cost(n) - DRAFT for n in range(most + 1)),), (DRAFT,))


# --- where to stop --------------------------------------------------------------------------------------------------


def test_the_rates_of_the_worked_example() -> None:
    theta = rates(masses(), curve(linear))
    known = [0.04167, 0.06423, 0.07329, 0.08166, 0.08837, 0.09342, 0.09721, 0.09938, 0.10113, 0.10252, 0.10330]
    assert theta[:13] == pytest.approx([*known, 0.10363, 0.10349], abs=6e-6)
    theta = rates(masses(), curve(quadratic))
    assert theta[8:10] == pytest.approx([0.10113, 0.10097], abs=6e-6)
    theta = rates(masses(), curve(hinge))
    assert theta[4:6] == pytest.approx([0.09721, 0.09519], abs=6e-6)


@pytest.mark.parametrize(("cost", "nodes"), [(linear, 11), (quadratic, 8), (hinge, 4)])
def test_the_first_stop_is_the_best_where_costs_are_convex(cost, nodes: int) -> None:
    """And the roofline's rule, which is the same multiplied out, stops there too."""
    theta = rates(masses(), curve(cost))
    assert first_stop(theta) == best_stop(theta) == nodes
    assert worth(masses(), curve(cost)) == nodes


def test_on_a_staircase_the_first_stop_is_not_the_best() -> None:
    theta = rates(masses(), curve(staircase))
    assert first_stop(theta) == 4 and theta[4:6] == pytest.approx([0.08641, 0.08408], abs=6e-6)
    assert best_stop(theta) == 12 and theta[12] == pytest.approx(0.09785, abs=6e-6)


def test_free_nodes_are_all_taken_and_dear_ones_are_not() -> None:
    assert first_stop(rates(masses(), curve(lambda n: 24.0))) == worth(masses(), curve(lambda n: 24.0)) == 20
    assert first_stop(rates(masses(), curve(lambda n: 24.0 + 1000 * n))) == 0
    assert worth(masses(), curve(lambda n: 24.0 + 1000 * n)) == 0
    two = [2 * mass for mass in masses()]  # two texts that promise the same
    assert first_stop(rates(two, curve(linear), 2)) == worth(two, curve(linear), 2) == 11


# --- curves ---------------------------------------------------------------------------------------------------------


def test_rising_is_the_nearest_sequence_without_falls() -> None:
    assert rising([1, 3, 2, 2, 5]) == pytest.approx([1, 7 / 3, 7 / 3, 7 / 3, 5])
    assert rising([3, 2, 1]) == [2, 2, 2]


def test_the_nearest_convex_curve_is_convex_and_no_other_is_nearer() -> None:
    """Against many random convex curves; a curve that is convex already stays."""
    generator = torch.Generator().manual_seed(0)
    places = [1, 2, 4, 8, 16, 24, 32]
    assert rising_convex(places, [2.0 + 0.1 * x * x for x in places]) == pytest.approx(
        [2 + 0.1 * x * x for x in places]
    )
    values = [20 + 0.5 * x + 6 * float(torch.randn((), generator=generator)) for x in places]
    found = rising_convex(places, values)
    slopes = [(b - a) / (y - x) for a, b, x, y in zip(found, found[1:], places, places[1:], strict=False)]
    assert slopes[0] >= -1e-9 and all(after >= before - 1e-9 for before, after in itertools.pairwise(slopes))
    error = sum((f - v) ** 2 for f, v in zip(found, values, strict=True))
    x = torch.tensor(places, dtype=torch.float64)
    hinges = (x[:, None] - x[:-1]).clamp_min(0)
    for _ in range(300):
        change = 0.3 * torch.rand(6, generator=generator, dtype=torch.float64)
        other = torch.tensor(found) * float(torch.rand((), generator=generator)) + hinges @ change
        shifted = other - other.mean() + sum(values) / 7
        assert float(((shifted - torch.tensor(values)) ** 2).sum()) >= error - 1e-9


def test_weights_that_would_be_negative_are_zero() -> None:
    columns = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    assert not_negative(columns, torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)).tolist() == pytest.approx([2, 0])
    assert not_negative(columns, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)).tolist() == pytest.approx([1, 1])


def test_the_line_of_the_worked_example() -> None:
    places, values = (16, 24, 32, 48, 64, 96, 128), (30.6, 30.2, 30.6, 31.2, 31.5, 32.2, 32.6)
    assert line_through(places, values) == pytest.approx((30.042377, 0.021087), abs=1e-6)
    wider = CostTable((1, 8, *places), (0,), ((90.0, 2.0, *values),), (0.0,)).straight()  # the first two do not count
    assert wider.verify[0][0] == pytest.approx(30.042377 + 0.021087, abs=1e-5)


# --- tables ---------------------------------------------------------------------------------------------------------


def test_a_table_counts_the_root_and_goes_on_linearly() -> None:
    table = CostTable((1, 3, 5), (0, 100), ((10.0, 12.0, 16.0), (20.0, 22.0, 26.0)), (1.0, 3.0))
    assert table.seconds(6, 0) == [11, 12, 13, 15, 17, 19, 21]  # the last slope goes on
    assert table.seconds(1, 50) == [17, 18] and table.seconds(0, 200) == [35]
    assert CostTable.of(json.loads(json.dumps(table.plain()))) == table


def test_a_dip_of_the_clock_is_no_reason_to_judge_more() -> None:
    table = CostTable((1, 2, 3), (0,), ((10.0, 14.0, 12.0),), (0.0,))
    assert table.rising().verify == ((10.0, 13.0, 13.0),)
    convex = table.convex().verify[0]
    assert convex[0] <= convex[1] <= convex[2] and convex[2] - convex[1] >= convex[1] - convex[0] - 1e-9


# --- the roofline ---------------------------------------------------------------------------------------------------


def test_a_roofline_is_found_again_in_its_own_times() -> None:
    """Memory decides where few tokens are judged, arithmetic where many are."""
    facts = toy_target().facts
    made = Roofline(facts, 2, arithmetic=(3e-9, 1e-4), memory=(1e-7, 2e-3), draft=5e-3)
    nodes, contexts = (1, 2, 4, 8, 16, 32, 64, 128, 256), (32, 200)
    rows = tuple(tuple(made.verify(count, context) for count in nodes) for context in contexts)
    sides = {
        made.arithmetic[0] * amounts(facts, count, 32, 2)[0] + made.arithmetic[1] == made.verify(count, 32)
        for count in nodes
    }
    assert sides == {True, False}
    found = Roofline.fitted(CostTable(nodes, contexts, rows, (5e-3, 5e-3)), facts, 2)
    for context, row in zip(contexts, rows, strict=True):
        assert found.seconds(255, context)[0] == pytest.approx(5e-3 + row[0], rel=0.02)
        assert [found.verify(count, context) for count in nodes] == pytest.approx(row, rel=0.05)


def test_what_a_forward_computes_and_moves() -> None:
    """By hand: one layer each of everything, 3 tokens after 5."""
    facts = toy_target().facts
    heads, groups = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    weights = facts.num_layers * (
        2 * facts.hidden_size * heads + 2 * facts.hidden_size * groups + 3 * facts.hidden_size * facts.intermediate_size
    ) + (facts.hidden_size * facts.vocab_size)
    operations, moved = amounts(facts, 3, 5, 2)
    assert operations == 2 * 3 * (2 * weights + 4 * facts.num_layers * heads * 8)
    assert moved == weights + 2 * (2 * facts.num_layers * groups * 8 + 3 * facts.vocab_size)


def test_two_lines_of_too_few_entries_are_one() -> None:
    one, other = two_lines([(1.0, 5.0, 10.0)])
    assert one == other == (0.0, 0.0)


# --- the file -------------------------------------------------------------------------------------------------------


def test_a_place_is_measured_once_and_another_machine_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CostBook, "known", {})
    measured = []

    def measure() -> CostTable:
        measured.append(1)
        return CostTable((1, 2), (0,), ((1.0, 1.0 + len(measured)),), (0.0,))

    book = CostBook(tmp_path / "run")
    first = book.table({"machine": "a"}, measure)
    monkeypatch.setattr(CostBook, "known", {})  # another process
    assert CostBook(tmp_path / "run").table({"machine": "a"}, measure) == first and len(measured) == 1
    assert book.table({"machine": "b"}, measure).verify == ((1.0, 3.0),) and len(measured) == 2
    assert len(json.loads((tmp_path / "run" / "costs.json").read_text())) == 2
    assert CostBook().table({"machine": "b"}, measure).verify == ((1.0, 3.0),) and len(measured) == 2
    (tmp_path / "run" / "costs.json").write_text("[{")
    with pytest.raises(ValueError, match=r"costs\.json: damaged .* Delete it"):
        book.table({"machine": "a"}, measure)
