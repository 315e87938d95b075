"""Points of a sweep that would stand in each other's way, or in the way of runs that are there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_lightning.bench.differences import comparable_text
from dflash_lightning.bench.method import Method
from dflash_lightning.bench.plan import Plan
from dflash_lightning.bench.points import Point
from dflash_lightning.recipe.faults import Fault, RecipeError
from dflash_lightning.recipe.tree import plain_tree
from dflash_lightning.run import RunFolder


def check_distinct(recipes: Mapping[Point, Any]) -> None:
    """Refuse points that would train the same run twice, or that a comparison would take for one run.

    Raises:
        RecipeError: names all such pairs.
    """
    faults: list[Fault] = []
    trained: dict[tuple[str, Any], Point] = {}
    called: dict[tuple[Method, Any], Point] = {}
    for point, cfg in recipes.items():
        recipe = plain_tree(cfg, [])
        seed = recipe.get("seed")
        asked = {"recipe": point.recipe, "overrides": point.overrides}
        method = Method.of_run({"asked": asked}, recipe)
        same = trained.setdefault((comparable_text(recipe), seed), point)
        alike = called.setdefault((method, seed), point)
        if same is not point:
            faults.append(Fault(point.name, f"would train the same run as {same.name}", "Name one of the two values"))
        elif alike is not point:
            what = f"a comparison would call it {method.name!r}, seed {seed}, like {alike.name}"
            faults.append(Fault(point.name, what, "Leave out name=, which is the same for both"))
    if faults:
        raise RecipeError(faults, "the sweep")


def check_folder(recipes: Mapping[Point, Any], plan: Plan) -> None:
    """Refuse a folder that is a file or a run, or holds another run where a point's own would be.

    Raises:
        ValueError: says which, and in what they differ.
    """
    other = "Choose another folder with --runs FOLDER"
    if plan.folder.exists() and not plan.folder.is_dir():
        raise ValueError(f"--runs: {plan.folder} is a file. {other}.")
    if RunFolder(plan.folder).recipe.exists():
        raise ValueError(f"--runs: {plan.folder} is a run itself, and a sweep is a folder of runs. {other}.")
    for point, cfg in recipes.items():
        if differing := _differing(RunFolder(plan.run(point)), cfg):
            listed = "\n".join(f"    {line}" for line in differing)
            raise ValueError(
                f"--runs: {plan.run(point)} holds a run of another recipe:\n{listed}\n  {other}, or make an axis of "
                "what differs (key=a,b): its values become part of the folders' names."
            )


def _differing(run: RunFolder, cfg: Any) -> list[str]:
    """A damaged run is no reason to stop a sweep: the point's own command says what is wrong."""
    try:
        return run.at_stake(cfg)
    except ValueError:
        return []
