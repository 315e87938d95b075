"""Points of a sweep that would be one run, and folders that hold other runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from dflash_lightning.bench.distinct import check_distinct, check_folder
from dflash_lightning.bench.plan import Plan
from dflash_lightning.bench.points import Point
from dflash_lightning.recipe.faults import RecipeError

PLAIN = {"optim": {"lr": 1e-3}, "head": {"_target_": "dflash_lightning.head.MarginalHead"}}


def _recipes(folder: Path, **recipes: dict[str, Any]) -> dict[Point, DictConfig]:
    """Points by name, each of the recipe ``bench/dflash`` with the words ``name=a`` and the like behind it."""
    return {
        Point(name, "bench/dflash", tuple(recipe.pop("words", ()))): OmegaConf.create(
            {"name": "bench/dflash", "seed": 1, "run_dir": str(folder / name), **PLAIN, **recipe}
        )
        for name, recipe in recipes.items()
    }


def test_points_that_differ_in_a_setting_or_a_seed_are_distinct(tmp_path: Path) -> None:
    check_distinct(
        _recipes(
            tmp_path,
            a={},
            b={"words": ["seed=2"], "seed": 2},
            c={"words": ["optim.lr=2e-3"], "optim": {"lr": 2e-3}},
            d={"name": "bench/dspark", "head": {"_target_": "dflash_lightning.head.MarkovHead"}},
        )
    )


@pytest.mark.parametrize(
    "second",
    [
        {"words": ["optim.lr=0.001"]},
        {"words": ["measure.limit=2"], "measure": {"limit": 2}},
        {"words": ["name=b"], "name": "b"},
        {"logger": {"save_dir": "elsewhere"}},
    ],
)
def test_two_points_that_train_the_same_run_are_a_fault(tmp_path: Path, second: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="b: would train the same run as a"):
        check_distinct(_recipes(tmp_path, a={"words": ["optim.lr=1e-3"]}, b=second))


def test_two_methods_of_one_name_are_a_fault(tmp_path: Path) -> None:
    two = _recipes(tmp_path, a={"name": "mine"}, b={"name": "mine", "optim": {"lr": 2e-3}})
    with pytest.raises(RecipeError, match="b: a comparison would call it 'mine', seed 1, like a"):
        check_distinct(two)


def test_a_folder_of_runs_is_no_file_and_no_run(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--runs: .*file is a file\. Choose another"):
        check_folder({}, Plan(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"--runs: .* is a run itself, and a sweep is a folder of runs"):
        check_folder({}, Plan(make_run("bench/dflash", 1)))


def test_a_folder_with_another_run_in_a_points_place_is_refused(
    tmp_path: Path, make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("")
    run = make_run("bench/dflash", 1)
    plan, there = Plan(run.parent), OmegaConf.to_container(OmegaConf.load(run / "recipe.yaml"))
    assert isinstance(there, dict)
    point = Point(run.name, "bench/dflash", ())
    check_folder({point: OmegaConf.create({**there, "measure": {"limit": 1}})}, plan)
    changed = {point: OmegaConf.create({**there, "optim": {"lr": 2e-3}})}
    with pytest.raises(ValueError, match=r"holds a run of another recipe:\n    optim.lr: 0.0006 there, 0.002 now\n"):
        check_folder(changed, plan)
    (run / "run.json").write_text("{")
    check_folder(changed, plan)  # its own command says that it is damaged
    (run / "run.json").unlink()
    (run / "checkpoints" / "last.ckpt").unlink()
    check_folder(changed, plan)  # nothing to lose
