"""Recipes whose features come from servers: what is refused before any weight is loaded, and what is loaded then."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_lightning.errors import SettingError
from dflash_lightning.recipe import RecipeError, build_recipe, check_recipe, load_recipe, make_target
from dflash_lightning.recipe.served import loads_layers
from dflash_lightning.target import FrozenTarget
from dflash_lightning.testing.stand_in import StandIn

SERVED = ["data=served", "data.features.endpoints=[http://127.0.0.1:9]"]
BLIND = ["callbacks=[checkpoint_last]"]


@pytest.fixture
def folder(
    tmp_path: Path, make_tiny_model: Callable[..., Any], byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with a tiny Llama of 4 layers in several files, and rows."""
    make_tiny_model("llama").save_pretrained(tmp_path / "target", max_shard_size="40KB")
    byte_tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "hello there"}) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(*overrides: str) -> Any:
    prompts = [] if BLIND[0] in overrides else ["callbacks.speculative_eval.prompts=rows.jsonl"]
    return load_recipe("smoke", ["target.source=./target", "data.train=rows.jsonl", *prompts, *SERVED, *overrides])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"callbacks\.speculative_eval: it needs the whole target.*target\.layers=true.*run dflash evaluate"),
        ([*BLIND, "data.features.endpoints=[gpu:8000]"], r"data\.features\.endpoints: 'gpu:8000'.*http://HOST"),
        ([*BLIND, "data.features.endpoints=[]"], "no server is named"),
        ([*BLIND, "data.features.endpoints=null"], r"data\.features\.endpoints: None .*does not fit"),
        ([*BLIND, "data.features.timeout=0"], r"data\.features\.timeout: 0 is not above 0"),
        ([*BLIND, "data.features.layer_ids=[1,2]"], r"data\.features\.layer_ids: \[1, 2\] lacks \[\d\]"),
        (
            [*BLIND, "conditioning=target_kv", "~conditioning.num_features"],
            r"data\.features: the drafter reads keys and values of the target",
        ),
        (["target.layers=true", "conditioning=carryover"], r"'carryover' plays rounds.*data\.features=null"),
        ([*BLIND, "drafter=target_tail"], r"drafter: drafter 'target_tail' runs layers of the target.*layers=true"),
        ([*BLIND, "drafter=warm_start"], r"target\.layers: the decoder layers.*starts from layer \d.*layers=true"),
        (
            [*BLIND, "data.cache_features=ram", "data.feature_products=auto"],
            r"data\.feature_products: applies to features that the target computes here, but servers",
        ),
        ([*BLIND, "data.features=null", "target.layers=false"], r"target\.layers: false, but the target computes"),
    ],
)
def test_what_servers_cannot_do_is_a_fault(overrides: list[str], message: str, folder: Path) -> None:
    with pytest.raises(RecipeError, match=re.compile(message, re.DOTALL)):
        check_recipe(recipe(*overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        BLIND,
        ["target.layers=true"],
        [*BLIND, "data.cache_features=disk"],
        [*BLIND, "loss=forward_kl"],
        ["target.layers=true", "drafter=warm_start"],
        [*BLIND, "data.features.layer_ids=[0,1,2,3,4]"],
    ],
)
def test_what_they_can_do_is_none(overrides: list[str], folder: Path) -> None:
    check_recipe(recipe(*overrides))


def test_a_server_is_asked_before_weights_are_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_lightning.recipe.build.make_target", lambda *a, **k: pytest.fail("weights are loaded"))
    with pytest.raises(SettingError, match=r"data\.features\.endpoints: http://127\.0\.0\.1:9/v1/models: no usable"):
        build_recipe(recipe(*BLIND))


def test_the_layers_of_the_target_are_neither_loaded_nor_needed(
    folder: Path, tiny_target: FrozenTarget, tmp_path: Path
) -> None:
    """The files that hold nothing but layers may be missing; asked for whole, the target is whole."""
    (folder / "states").mkdir()
    with StandIn(tiny_target, (2,), folder / "states") as server:
        address = f"data.features.endpoints=[{server.url}]"
        whole = build_recipe(recipe("target.layers=true", address)).target
        names = json.loads((folder / "target" / "model.safetensors.index.json").read_text())["weight_map"]
        needed = {file for name, file in names.items() if ".layers." not in name}
        idle = {*names.values()} - needed
        assert idle
        for file in idle:
            (folder / "target" / file).unlink()
        bare = build_recipe(recipe(*BLIND, address)).target
    assert whole.has_layers and not bare.has_layers
    assert bare.embedding_weight.equal(whole.embedding_weight) and bare.lm.weight.equal(whole.lm.weight)
    assert bare.facts.digest == "" and bare.facts.vocab_size == whole.facts.vocab_size
    with pytest.raises(SettingError, match=r"target\.layers: the decoder layers of \./target were not read"):
        bare.check()
    with pytest.raises(SettingError, match="layer 0 from it"):
        bare.decoder_layer_state(0)


def test_a_loader_of_ones_own_reads_what_it_reads(folder: Path) -> None:
    """It knows no ``layers``, so that nothing is refused for the want of them."""
    node = {"_target_": "dflash_lightning.testing.toys.toy_target", "source": None, "dtype": None}
    tree = {"target": node, "data": {"features": {"endpoints": ["http://a:1"]}}}
    assert loads_layers(tree)
    assert not loads_layers(
        {**tree, "target": {**node, "_target_": "dflash_lightning.target.load_target", "source": "x"}}
    )


def test_commands_that_decode_a_run_load_its_whole_target(folder: Path) -> None:
    node = {"_target_": "dflash_lightning.target.load_target", "source": "./target", "layers": False}
    assert make_target(node).has_layers


def test_a_checkpoint_that_cannot_be_read_in_part_says_why(folder: Path) -> None:
    files = sorted((folder / "target").glob("model-*.safetensors"))
    files[0].write_bytes(files[0].read_bytes()[:-8])
    for file in files[1:]:
        file.unlink()
    with pytest.raises(SettingError, match=r"target.*(cut short|no safetensors file of it holds the tensor)"):
        make_target({"_target_": "dflash_lightning.target.load_target", "source": "./target"}, layers=False)
