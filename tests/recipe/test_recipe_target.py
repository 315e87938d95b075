"""Faults that a target's config.json tells, before weights are loaded and rows are tokenised."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_lightning.head import MarginalHead
from dflash_lightning.model import save_draft
from dflash_lightning.recipe import RecipeError, build_recipe, check_recipe, load_recipe
from dflash_lightning.target.preview import preview


@pytest.fixture
def folder(tmp_path: Path, make_tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the configuration of a tiny Llama of 4 layers, and no weights at all."""
    make_tiny_model("llama").config.save_pretrained(tmp_path / "target")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "hello there"}) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


FILES = ["target.source=./target", "data.train=rows.jsonl", "callbacks.speculative_eval.prompts=rows.jsonl"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["conditioning.target_layer_ids=[1,9]"], r"asks for layer 9, but \./target has 4 decoder layers"),
        (["conditioning.target_layer_ids=[1,1]"], r"names a layer twice"),
        (
            ["data.cache_features=ram", "data.cache_also={layer_ids: [1, 4]}"],
            r"data\.cache_also\.layer_ids: \[1, 4\] asks for layer 4, .*Name layers from 0 to 3",
        ),
        (
            ["head=edge", "head.candidates=273", "loss.cross_entropy.view=base"],
            r"head\.candidates: 273 of 272 tokens",
        ),
        (
            ["decoding.adaptive=true"],
            r"1 fault.*- decoding\.adaptive: true lets the clock choose.*true where you decode",
        ),
        *(
            (
                [
                    "callbacks=[speculative_eval,checkpoint,expected_tau]",
                    "callbacks.expected_tau.rows=rows.jsonl",
                    word,
                ],
                said,
            )
            for word, said in (
                ("decoding.adaptive=true", r"1 fault.*- decoding\.adaptive: true lets the clock"),
                ("decoding=tree", r"1 fault.*- decoding\.builder: BestFirstTree does not draft a chain"),
            )
        ),
        (["conditioning.num_features=3"], r"num_features: 3 evenly spaced .* do not fit .*4 decoder layers"),
        (
            ["block.mask_token_id=272"],
            r"mask_token_id: 272 is outside the embedding of \./target \(rows 0\.\.271",
        ),
        (["data.max_length=513"], r"data\.max_length: 513 is not possible for \./target, which has 512 positions"),
        (["decoding.max_new_tokens=600"], r"decoding\.max_new_tokens: 600 leaves no position for a prompt.*has 512"),
        (["drafter=warm_start", "drafter.intermediate_size=48"], r"is \(64, 32\) in the target but \(48, 32\)"),
        (["drafter=warm_start", "drafter.num_heads=3"], r"drafter\.num_heads: 3 query heads cannot share 2"),
        (["init_from=gone"], r"init_from: there is no gone\. Give a run folder, a checkpoint file"),
        (["init_from={path:gone,parts:[drafter]}"], r"init_from: there is no gone\. Give a run folder"),
        (
            ["init_from={path:gone,part:[drafter]}"],
            r"init_from\.part: unknown key\. Did you mean .*Write init_from as",
        ),
    ],
)
def test_what_the_target_does_not_have_is_a_fault(overrides: list[str], message: str, folder: Path) -> None:
    with pytest.raises(RecipeError, match=re.compile(message, re.DOTALL)):
        check_recipe(load_recipe("smoke", [*FILES, *overrides]))


def test_what_fits_is_none(folder: Path) -> None:
    check_recipe(load_recipe("smoke", FILES))
    check_recipe(load_recipe("smoke", [*FILES, "drafter=warm_start", "conditioning.target_layer_ids=[0,3]"]))


def test_several_of_them_are_reported_at_once(folder: Path) -> None:
    wrong = ["conditioning.target_layer_ids=[7]", "block.mask_token_id=999", "data.max_length=600", "optim.lr=-1"]
    with pytest.raises(RecipeError, match="4 faults"):
        check_recipe(load_recipe("smoke", [*FILES, *wrong]))


def test_a_family_that_copies_no_layers_is_refused_by_its_configuration(
    folder: Path, make_tiny_model: Callable[..., Any]
) -> None:
    make_tiny_model("mixtral").config.save_pretrained(folder / "moe")
    moe = [*FILES, "target.source=./moe", "drafter=warm_start"]
    with pytest.raises(RecipeError, match=r"layer has .*which a draft layer does not.*init_from_target=false"):
        check_recipe(load_recipe("smoke", moe))


def test_a_configuration_that_says_nothing_yet_is_no_fault(folder: Path) -> None:
    (folder / "target" / "config.json").unlink()
    check_recipe(load_recipe("smoke", [*FILES, "conditioning.target_layer_ids=[99]"]))
    assert preview("owner/not-here") is None


def test_a_preview_has_the_facts_of_the_loaded_target(folder: Path, make_target: Callable[..., Any]) -> None:
    found = preview("./target")
    assert found is not None
    facts = make_target("llama").facts
    for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_positions"):
        assert getattr(found.facts, name) == getattr(facts, name)


def test_building_refuses_them_before_the_target_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_lightning.recipe.check_recipe", lambda cfg: None)  # as for a target on the hub
    monkeypatch.setattr("dflash_lightning.recipe.make_target", lambda node: pytest.fail("weights were asked for"))
    with pytest.raises(RecipeError, match="asks for layer 9"):
        build_recipe(load_recipe("smoke", [*FILES, "conditioning.target_layer_ids=[9]"]))


def test_a_drafter_to_start_from_is_held_to_the_recipe_before_weights_are_loaded(
    folder: Path, make_target: Callable[..., Any], make_draft: Callable[..., Any]
) -> None:
    save_draft(make_draft(make_target("llama")), folder / "draft")
    with pytest.raises(RecipeError, match=r"init_from: the drafter in draft is not the one .*num_hidden_layers is 1"):
        check_recipe(load_recipe("smoke", [*FILES, "init_from=draft"]))
    check_recipe(load_recipe("smoke", [*FILES, "init_from=draft", "drafter.num_layers=2"]))
    grown = ["drafter.num_layers=2", "block.block_size=6"]
    with pytest.raises(RecipeError, match=r"block_size is 6 in the recipe, 4 there.*list what .*init_from\.change"):
        check_recipe(load_recipe("smoke", [*FILES, *grown, "init_from=draft"]))
    check_recipe(load_recipe("smoke", [*FILES, *grown, "init_from={path:draft,change:[block_size]}"]))


def test_a_head_that_cannot_learn_the_blocks_is_refused_whatever_the_target(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MarginalHead, "label_layouts", ("anchor_first",))
    elsewhere = [*FILES, "target.source=owner/not-here"]
    with pytest.raises(
        RecipeError, match=r"block\.label_layout: head 'marginal' cannot be trained with 'same_position'"
    ):
        check_recipe(load_recipe("smoke", elsewhere))
    check_recipe(load_recipe("smoke", [*elsewhere, "+block.label_layout=anchor_first"]))
