"""``dflash recipes --json``: what there is to train with, as plain values, read without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_lightning.cli import main
from dflash_lightning.recipe.catalogue import axes_of, catalogue, systems_of
from dflash_lightning.recipe.folders import group_options, recipe_names, recipes_folder


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["recipes", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_recipe_and_option_is_listed_with_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys)
    assert [recipe["name"] for recipe in found["recipes"]] == recipe_names()
    names = {group: [option["name"] for option in options] for group, options in found["options"].items()}
    assert names == group_options()
    everything = [*found["recipes"], *(option for options in found["options"].values() for option in options)]
    assert all(entry["summary"] and Path(entry["file"]).is_file() for entry in everything)
    for group, options in found["options"].items():
        for option in options:
            parts = option["parts"].values() if "parts" in option else [option]
            assert all("." in part["class"] for part in parts), (group, option["name"])


def test_a_recipe_has_the_options_of_the_recipes_it_derives_from(capsys: pytest.CaptureFixture[str]) -> None:
    recipes = {recipe["name"]: recipe for recipe in listed(capsys)["recipes"]}
    axes = recipes["quickstart"]["axes"]
    assert axes["drafter"] == "warm_start" and axes["target"] == "smollm2"  # its own
    assert axes["head"] == "marginal" and axes["loss"] == "cross_entropy"  # of dflash
    assert axes["callbacks"] == ["speculative_eval", "checkpoint"]
    assert recipes["dflash"]["systems"] == recipes["quickstart"]["systems"] == ["1"]


def test_an_option_has_the_settings_of_its_class_and_its_own() -> None:
    options = {option["name"]: option for option in catalogue(recipes_folder())["options"]["drafter"]}
    warm, plain = options["warm_start"], options["block_transformer"]
    assert warm["class"] == plain["class"] == "dflash_lightning.drafter.BlockTransformer"
    assert warm["settings"]["init_from_target"] is True and plain["settings"]["init_from_target"] is False
    assert warm["settings"]["num_layers"] == plain["settings"]["num_layers"]
    losses = {option["name"]: option for option in catalogue(recipes_folder())["options"]["loss"]}
    settings = losses["cross_entropy"]["parts"]["cross_entropy"]["settings"]
    assert settings["view"] == "main" and settings["coefficient"] == 1.0


def test_numbers_are_numbers_and_a_damaged_file_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "mine.yaml").write_text("# Mine.\n# systems: 27, 1a\n_target_: a.B\nlr: 6e-4\n")
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss" / "broken.yaml").write_text("a: [\n")
    (tmp_path / "own.yaml").write_text("# Own.\n#\n# systems: 3\ndefaults: [dflash, {override optim: mine}, _self_]\n")
    found = catalogue(tmp_path, recipes_folder())
    (optim,) = [option for option in found["options"]["optim"] if option["name"] == "mine"]
    assert optim == {
        **{"name": "mine", "file": str(tmp_path / "optim" / "mine.yaml"), "summary": "Mine.", "systems": ["27", "1a"]},
        **{"class": "a.B", "settings": {"lr": 6e-4}},
    }
    assert any(option["name"] == "broken" for option in found["options"]["loss"])
    own = found["recipes"][0]
    assert own["name"] == "own" and own["systems"] == ["3"] and own["axes"]["head"] == "marginal"


def test_systems_stand_in_the_head_of_a_file_only(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("# A.\nx: 1\n# systems: 3\n")
    assert systems_of(file) == []
    assert axes_of(file, ()) == {}


def test_no_recipe_names_a_system_twice() -> None:
    for name in recipe_names():
        systems = systems_of(recipes_folder() / f"{name}.yaml")
        assert len(systems) == len(set(systems)), name
