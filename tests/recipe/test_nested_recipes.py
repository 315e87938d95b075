"""Recipes in sub-folders: found, named, composed, and told from options."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_lightning.cli import main
from dflash_lightning.recipe import RecipeError, load_recipe
from dflash_lightning.recipe import folders as folders_module
from dflash_lightning.recipe.catalogue import axes_of
from dflash_lightning.recipe.folders import (
    folders_of,
    group_options,
    recipe_name,
    recipe_names,
    recipes_folder,
    summary_of,
)

SHARED = "# @package _global_\n# What all have.\ndefaults:\n  - override /head: markov\n  - _self_\noptim: {lr: 1e-3}\n"
DFLASH = (
    "# @package _global_\n# DFlash there.\ndefaults:\n  - /dflash\n  - /trial/_shared\n  - _self_\nhead: {rank: 8}\n"
)
OTHER = "# @package _global_\n# Another.\ndefaults:\n  - /trial/dflash\n  - override /loss: mine\n  - _self_\n"
MINE = "# A loss of one's own.\nmine:\n  _target_: dflash_lightning.loss.CrossEntropy\n"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder of recipes of one's own with a sub-folder of further ones, and an option."""
    for name, text in (("_shared", SHARED), ("dflash", DFLASH), ("other", OTHER)):
        (tmp_path / "trial").mkdir(exist_ok=True)
        (tmp_path / "trial" / f"{name}.yaml").write_text(text)
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss" / "mine.yaml").write_text(MINE)
    return tmp_path


def test_a_recipe_in_a_subfolder_composes_from_shipped_ones_of_its_own_name_and_from_its_neighbours(own: Path) -> None:
    cfg = load_recipe(str(own / "trial" / "dflash.yaml"), ["optim.lr=2e-3"])
    assert (cfg.name, cfg.run_dir) == ("trial/dflash", "runs/trial/dflash")
    assert cfg.head._target_.endswith("MarkovHead") and cfg.head.rank == 8
    assert cfg.optim.lr == 2e-3
    other = load_recipe(str(own / "trial" / "other.yaml"))
    assert list(other.loss) == ["mine"] and other.head.rank == 8 and other.optim.lr == 1e-3


def test_subfolders_of_recipes_are_no_groups_and_files_with_an_underscore_no_recipes(own: Path) -> None:
    assert recipe_names(own) == ["trial/dflash", "trial/other"]
    assert group_options(own) == {"loss": ["mine"]}
    file = own / "trial" / "dflash.yaml"
    assert recipe_name(file) == "trial/dflash" and summary_of(file) == "DFlash there."
    assert folders_of(file) == [own.resolve(), recipes_folder().resolve(), (own / "trial").resolve()]
    assert axes_of(own / "trial" / "other.yaml", (own, recipes_folder()))["head"] == "markov"


def test_shipped_ones_go_by_name(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that stands in for the shipped one, with the same options."""
    for part in recipes_folder().iterdir():
        if not (own / part.name).exists():
            (own / part.name).symlink_to(part)
    (own / "loss" / "cross_entropy.yaml").symlink_to(recipes_folder() / "loss" / "cross_entropy.yaml")
    for module in ("recipe.load", "recipe.folders", "recipe.compose", "recipe.overrides", "commands.listing"):
        monkeypatch.setattr(f"dflash_lightning.{module}.recipes_folder", lambda: own)
    assert folders_module.recipes_folder() == own
    assert load_recipe("trial/dflash").name == "trial/dflash"
    assert main(["recipes"]) == 0
    assert "  trial/dflash" in capsys.readouterr().out
    with pytest.raises(RecipeError, match="Did you mean 'trial/dflash'"):
        load_recipe("trial/dflsh")


def test_a_neighbour_that_is_not_there_is_named_with_those_that_are(own: Path) -> None:
    (own / "trial" / "dflash.yaml").write_text(DFLASH.replace("_shared", "other_one"))
    with pytest.raises(RecipeError, match=r"its defaults name 'trial/other_one', which is no recipe.*'trial/other'"):
        load_recipe(str(own / "trial" / "dflash.yaml"))
