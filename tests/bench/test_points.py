"""The points of a sweep: what an axis is, what folders are called, what is refused."""

from __future__ import annotations

import pytest

from dflash_lightning.bench.method import Method, common_overrides
from dflash_lightning.bench.points import make_points, split_values
from dflash_lightning.recipe.faults import RecipeError


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2,3", ["1", "2", "3"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("{a: 1, b: [2,3]},null", ["{a: 1, b: [2,3]}", "null"]),
        ("'a,b',\"c,d\"", ["'a,b'", '"c,d"']),
        ("", [""]),
    ],
)
def test_commas_inside_brackets_and_quotes_divide_nothing(text: str, values: list[str]) -> None:
    assert split_values(text) == values


def test_every_combination_is_a_point_with_a_readable_folder() -> None:
    points = make_points("bench/dflash,bench/dspark", ["optim.lr=1e-3,2e-3", "seed=1,2", "block.block_size=8"])
    assert len(points) == 8
    assert points[0].name == "bench-dflash_optim.lr-1e-3_seed-1"
    assert points[-1].name == "bench-dspark_optim.lr-2e-3_seed-2"
    assert points[-1].overrides == ("optim.lr=2e-3", "seed=2", "block.block_size=8")
    assert points[0].command_words("runs/x")[-1] == 'run_dir="runs/x"'


def test_a_single_seed_and_lists_are_in_the_name_and_a_word_without_value_is_a_setting() -> None:
    (first, second) = make_points(
        "folder/mine.yaml", ["conditioning.target_layer_ids=[4],[2,8]", "seed=7", "~loss.confidence"]
    )
    assert first.name == "mine_conditioning.target_layer_ids-4_seed-7"
    assert second.name == "mine_conditioning.target_layer_ids-2-8_seed-7"
    assert "~loss.confidence" in first.overrides


def test_points_never_share_a_folder() -> None:
    points = make_points("dflash", ["x=[a b],[a-b]"])
    assert len({point.name for point in points}) == 2
    assert points == make_points("dflash", ["x=[a b],[a-b]"])


@pytest.mark.parametrize(
    ("recipe", "words", "said"),
    [
        ("dflash", ["seed="], "seed=: names no value. Write seed=a,b."),
        ("dflash", ["seed=1,,2"], "seed=1,,2: a value is missing"),
        ("dflash", ["seed=1,1"], "seed: 1 is given twice"),
        ("dflash", ["seed=[1,2]"], "seed: [1,2] is a list, and a run has one seed. Write seed=1,2."),
        ("dflash", ["seed=1", "seed=2"], "seed: is given twice. Write all its values in one word"),
        ("dflash", ["run_dir=x"], "run_dir: a sweep gives every point a folder of its own. Use --runs FOLDER."),
        ("dflash,", ["seed=1"], "RECIPE: a value is missing"),
        ("dflash,dflash", [], "RECIPE: dflash is given twice"),
    ],
)
def test_words_that_make_no_axis_are_refused(recipe: str, words: list[str], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make_points(recipe, words)
    assert said in str(caught.value)


def test_a_method_is_its_recipe_and_overrides_whatever_the_seed() -> None:
    words = ["seed=2", "optim.lr=1e-3", "run_dir=runs/x", "measure.limit=3", "~seed", "name=other"]
    method = Method.of_run(
        {"asked": {"recipe": "bench/dspark", "overrides": words}}, {"name": "bench/dspark", "seed": 2}
    )
    assert method == Method("bench/dspark", ("optim.lr=1e-3",))
    assert method.name == "bench/dspark optim.lr=1e-3"
    assert Method.of_run({}, {"name": "dflash"}) == Method("dflash")
    others = [method, Method("bench/dflash", ("a=1", "optim.lr=1e-3"))]
    assert common_overrides(others) == ["optim.lr=1e-3"]
    assert others[1].name_without(common_overrides(others)) == "bench/dflash a=1"
