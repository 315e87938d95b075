"""A shipped recipe is composed once for the same options; every caller has a tree of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

from dflash_lightning.recipe import compose, folders
from dflash_lightning.recipe.compose import compose_file


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of recipes in the place of the shipped one: ``a.yaml`` names the option ``g/one.yaml``."""
    folder = tmp_path / "recipes"
    (folder / "g").mkdir(parents=True)
    (folder / "a.yaml").write_text("defaults: [{g: one}, _self_]\nx: 1\n")
    (folder / "g" / "one.yaml").write_text("y: 2\n")
    for module in (compose, folders):
        monkeypatch.setattr(module, "recipes_folder", lambda: folder)
    return folder


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The overrides of every time that something was composed."""
    made: list[tuple[str, ...]] = []
    once = compose._compose
    monkeypatch.setattr(
        compose, "_compose", lambda file, overrides: made.append(tuple(overrides)) or once(file, overrides)
    )
    return made


def test_the_same_options_are_composed_once_and_nobody_changes_anothers_tree(shipped: Path, composed: list) -> None:
    first = compose_file(shipped / "a.yaml", [])
    assert (first.x, first.g.y) == (1, 2)
    first.x, first.g.y = 7, 8
    again = compose_file(shipped / "a.yaml", [])
    assert (again.x, again.g.y) == (1, 2) and composed == [()]
    assert compose_file(shipped / "a.yaml", ["x=3"]).x == 3 and composed == [()]
    assert compose_file(shipped / "a.yaml", ["g=one", "x=3"]).x == 3 and composed == [(), ("g=one",)]


def test_a_changed_or_new_file_is_read_again(shipped: Path, composed: list) -> None:
    compose_file(shipped / "a.yaml", [])
    (shipped / "g" / "one.yaml").write_text("y: 22\n")
    assert compose_file(shipped / "a.yaml", []).g.y == 22
    (shipped / "g" / "two.yaml").write_text("y: 5\n")
    assert compose_file(shipped / "a.yaml", ["g=two"]).g.y == 5 and len(composed) == 3


def test_files_of_ones_own_and_values_from_outside_are_composed_every_time(
    shipped: Path, composed: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.yaml").write_text("defaults: [a, _self_]\n")
    for _ in range(2):
        assert compose_file(tmp_path / "own.yaml", []).g.y == 2
    for value in ("1", "2"):
        monkeypatch.setenv("OWN_VALUE", value)
        assert compose_file(shipped / "a.yaml", ["+z=${oc.env:OWN_VALUE}"]).z == value
    assert len(composed) == 4


@pytest.mark.parametrize(
    "words",
    [
        ["++optim.lr=1e-3", "target=custom", 'target.source="a b/c"', "++new.key={a: [1, null]}"],
        ["loss=[cross_entropy,tv]", "~loss.tv", "++loss.cross_entropy.decay=null", "~logger"],
        ["++conditioning.target_layer_ids=[1,2]", "+data.cache={x: 1}", "block=masked", "++block.num_anchors=3"],
    ],
)
def test_values_behind_kept_options_make_the_tree_that_hydra_composes(words: list[str]) -> None:
    file = compose.recipes_folder() / "dflash.yaml"
    once, kept = compose._compose(file, words), compose_file(file, words)
    assert OmegaConf.to_container(kept) == OmegaConf.to_container(once)
    assert list(kept) == list(once) and OmegaConf.is_struct(kept) == OmegaConf.is_struct(once)


@pytest.mark.parametrize("word", ["~optim.nothing", "seed.a=1", "+seed=2", "block.x=1"])
def test_values_that_hydra_refuses_are_refused_in_its_words(word: str) -> None:
    file = compose.recipes_folder() / "dflash.yaml"
    with pytest.raises(HydraException) as once:
        compose._compose(file, [word])
    said = compose._refusal(file, str(once.value))
    with pytest.raises(compose.CannotCompose) as kept:
        compose_file(file, [word])
    assert kept.value.faults == [said]
