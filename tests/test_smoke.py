"""``dflash smoke`` passes what is right, names the stage of what is not, and leaves nothing behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_lightning.cli import main
from dflash_lightning.commands import smoke as smoke_command
from dflash_lightning.commands import smoke_law
from dflash_lightning.commands.smoke import _line, try_recipe
from dflash_lightning.commands.smoke_law import p_value
from dflash_lightning.commands.smoke_stages import Trial
from dflash_lightning.commands.smoke_toy import ToyWorld, toy_recipe
from dflash_lightning.commands.smoke_words import chosen
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.loss import LossTerm
from dflash_lightning.recipe import RecipeError, list_faults, load_recipe
from dflash_lightning.recipe.folders import recipe_names

# A loss of one's own, that a test puts a fault into.
LOSS = """
import torch
from dflash_lightning.loss.cross_entropy import CrossEntropy


class Own(CrossEntropy):
    name = "own_of_test_smoke"

    def __init__(self, *, decay: float | None = None, coefficient: float = 1.0, view: str = "main") -> None:
        super().__init__(decay=decay, coefficient=coefficient, view=view)

    def numerator(self, *arguments):
        {body}
        return super().numerator(*arguments)
"""
RECIPE = """# A recipe of one's own.
defaults:
  - dflash
  - override loss: own
  - _self_
"""
OPTION = "# A loss of one's own.\nown:\n  _target_: own_losses.Own\n"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> ToyWorld:
    return ToyWorld.make(tmp_path_factory.mktemp("world"))


@pytest.fixture
def one_world(world: ToyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command takes the world that is made already."""
    monkeypatch.setattr(smoke_command, "_made", lambda folder: world)


@pytest.fixture
def own_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``own_recipe(body)``: a recipe whose loss runs ``body`` in every step, in a folder of its own."""

    def write(body: str) -> Path:
        (tmp_path / "own_losses.py").write_text(LOSS.format(body=body))
        (tmp_path / "loss").mkdir()
        (tmp_path / "loss" / "own.yaml").write_text(OPTION)
        (tmp_path / "mine.yaml").write_text(RECIPE)
        return tmp_path / "mine.yaml"

    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    sys.modules.pop("own_losses", None)
    LossTerm.registry.pop("own_of_test_smoke", None)


def test_all_are_the_shipped_recipes_but_those_in_sub_folders_and_each_is_tried_once() -> None:
    names = recipe_names()
    outer, inner = chosen(["all", "dflash"]), chosen(["ablation/all", "ablation/no_decay"])
    assert outer == [name for name in names if "/" not in name] and len(outer) >= 3
    assert inner == [name for name in names if name.startswith("ablation/")] and len(inner) >= 3
    with pytest.raises(RecipeError, match="nowhere/all: no such file"):
        chosen(["nowhere/all"])
    with pytest.raises(RecipeError, match="no recipe of that name is shipped"):
        chosen(["all", "dflsh"])


def test_a_shipped_recipe_passes_every_stage_and_leaves_nothing(one_world, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "scratch").mkdir()
    state = torch.get_rng_state()
    assert main(["smoke", "quickstart", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (entry,) = found["recipes"]
    assert found["passed"] and entry["error"] is None and entry["failed_stage"] is None
    assert entry["tau"] > 1.2 and entry["sampled_tau"] > 1.2, "hardly a draft is accepted: this tests nothing"
    assert list(entry["stages"]) == [
        *("compose", "build", "train", "greedy decoding", "sampled decoding", "load", "resume", "export")
    ]
    assert set(entry["refused"]) == {"hf", "zlab", "sglang", "vllm", "specforge"}  # it knows a part of the vocabulary
    assert [path.name for path in tmp_path.iterdir()] == ["scratch"] and not list((tmp_path / "scratch").iterdir())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("recipe", ["dflash", "longspark", "lilicorr"])
def test_a_recipe_of_the_bench_is_cut_down_too(world: ToyWorld, recipe: str, tmp_path: Path) -> None:
    """Its cache of features holds layers of its own target."""
    assert list_faults(toy_recipe(load_recipe(f"bench/{recipe}"), world, tmp_path / "run")) == []


def test_a_refusal_is_not_cut_within_a_word() -> None:
    entry = {"passed": True, "recipe": "r", "seconds": 1.0, "tau": 1.0, "sampled_tau": 1.0}
    reason = "cannot hold a drafter whose layers read another layer of the target each, which no such file can state"
    line = _line({**entry, "refused": {"hf": reason, "vllm": "cannot hold this"}}, 3)
    assert "refused: hf (cannot hold a drafter whose layers read another layer of the target each, ...)" in line
    assert line.endswith("vllm (cannot hold this)")


def test_a_class_that_fails_is_named_with_its_stage(one_world, own_recipe, capsys) -> None:
    file = own_recipe("raise RuntimeError('shapes do not fit')")  # a recipe and a class of one's own
    assert main(["smoke", str(file)]) == 1
    out = capsys.readouterr().out
    assert f"FAIL  {file}" in out and "in train: RuntimeError: shapes do not fit" in out
    assert "1 recipe in" in out and f"1 of 1 failed: {file}" in out
    assert main(["smoke", str(file), "loss.own.dekay=1"]) == 1
    assert "in build: 1 fault in recipe" in (out := capsys.readouterr().out) and "Did you mean 'decay'?" in out


def without(monkeypatch: pytest.MonkeyPatch, *stages: str) -> None:
    """Leave out stages that a test has no use for."""
    for stage in stages:
        monkeypatch.setattr(Trial, stage, lambda *given: None)


def test_what_resuming_loses_is_found(world, own_recipe, tmp_path, monkeypatch) -> None:
    """A loss that counts its own calls, which no checkpoint holds."""
    without(monkeypatch, "_decode_greedily", "_sample", "_load")
    file = own_recipe("self.calls = getattr(self, 'calls', 0) + 1; self.coefficient = 1.0 + self.calls % 7")
    entry = try_recipe(str(file), [], world, tmp_path / "try")
    assert entry["failed_stage"] == "resume" and "resumed at step 10" in entry["error"]


def test_drafts_that_were_not_drawn_from_their_law_are_found(world, tmp_path, monkeypatch) -> None:
    """Every second draft of a block is replaced after it was drawn; greedy decoding does not mind."""
    make = DecodingSettings.make_decoder

    def make_wrong(self: DecodingSettings, *arguments: Any, **named: Any) -> Any:
        decoder = make(self, *arguments, **named)
        builder: Any = decoder.parts.builder
        build = builder.build

        def changed(*given: Any, **more: Any) -> Any:
            draft = build(*given, **more)
            draft.tokens[:, 1::2] = 3
            return draft

        if arguments[1] is not None:
            builder.build = changed
        return decoder

    without(monkeypatch, "_decode_greedily")
    monkeypatch.setattr(DecodingSettings, "make_decoder", make_wrong)
    entry = try_recipe("dflash", [], world, tmp_path / "try")
    assert entry["failed_stage"] == "sampled decoding" and "not distributed as the target's own" in entry["error"]


def test_counts_tell_a_wrong_law_from_the_right_one() -> None:
    """The right law passes for every seed tried; one that is a tenth off does not."""
    generator = torch.Generator().manual_seed(0)
    p = torch.softmax(2 * torch.randn(4000, 8, generator=generator), -1)
    mixed = 0.9 * p + 0.1 * torch.nn.functional.one_hot(p.argmax(-1), 8)
    for _ in range(20):
        assert p_value(p, torch.multinomial(p, 1, generator=generator)[:, 0]) > smoke_law._LEAST
    assert p_value(p, torch.multinomial(mixed, 1, generator=generator)[:, 0]) < smoke_law._LEAST
    certain = torch.eye(8)[torch.zeros(5, dtype=torch.long)]
    assert p_value(certain, torch.zeros(5, dtype=torch.long)) == 1.0
    assert p_value(certain, torch.tensor([0, 0, 1, 0, 0])) == 0.0
