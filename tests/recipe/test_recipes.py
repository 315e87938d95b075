"""Recipes load, check and round-trip; every fault is reported, all at once, with the way out."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
from omegaconf import OmegaConf

from dflash_lightning.drafter import ConvTransformer
from dflash_lightning.head import LatticeHead
from dflash_lightning.recipe import RecipeError, build_recipe, check_recipe, data_files, load_recipe, recipe_text
from dflash_lightning.recipe.folders import group_options, recipe_names, recipes_folder, summary_of
from dflash_lightning.recipe.hints import advice, conform, describe, fits

BENCH = [name for name in recipe_names() if name.startswith("bench/")]
RECIPES = [name for name in recipe_names() if "/" not in name]  # test_ablations.py has those in sub-folders
PARTNERS = {  # what an option does not go without
    ("loss", "confidence"): ["head=markov", "head.confidence=true"],
    ("data", "served"): ["data.features.endpoints=[http://127.0.0.1:9]", "target.layers=true"],
    ("loss", "length"): ["head=length"],
    ("head", "length"): ["loss=[cross_entropy,length]"],
    ("decoding", "d2sd"): ["decoding.builder.second=owner/second"],  # on the hub: not looked at here
    ("decoding", "length"): ["head=length", "loss=[cross_entropy,length]"],
    ("loss", "survival"): ["head=survival"],
    ("loss", "fading"): ["head=prefix"],
    ("loss", "refined"): ["head=refiner"],
    ("loss", "local"): ["head=experts"],
    ("head", "survival"): ["loss=[cross_entropy,survival]"],
    ("decoding", "confidence"): ["head=markov", "head.confidence=true", "loss=[cross_entropy,confidence]"],
    ("decoding", "shared_budget"): ["head=corrected", "head.confidence=true", "loss=[cross_entropy,confidence]"],
    ("head", "lattice"): ["loss=[cross_entropy,lattice]"],
    ("loss", "lattice"): ["head=lattice"],
    ("head", "selector"): ["loss=[cross_entropy,candidate_cross_entropy]"],
    ("loss", "candidate_cross_entropy"): ["head=selector"],
    ("block", "tokens"): ["drafter=causal_transformer"],
    ("drafter", "causal_transformer"): ["block=tokens"],
    ("drafter", "feedback_transformer"): ["block=tokens", "conditioning=token_fusion"],
}
OPTIONS = [(group, option) for group, options in group_options().items() for option in options]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Overrides that fill what recipes leave open: a target folder, training rows, prompts."""
    rows = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there, friend"}]
    rows.write_text(json.dumps({"messages": messages}) + "\n")
    (tmp_path / "target").mkdir()
    return [
        f"target.source={tmp_path / 'target'}",
        f"data.train={rows}",
        f"callbacks.speculative_eval.prompts={rows}",
        f"run_dir={tmp_path / 'run'}",
    ]


def _faults(recipe: str, overrides: list[str]) -> str:
    with pytest.raises(RecipeError) as caught:
        check_recipe(load_recipe(recipe, overrides))
    return str(caught.value)


# -- what is shipped --------------------------------------------------------------------------------------------------


def test_the_shipped_recipes_are_found() -> None:
    assert {"dflash", "quickstart", "smoke"} <= set(RECIPES)
    assert len(OPTIONS) > 15


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_opens_with_paper_purpose_and_command(name: str) -> None:
    head = (recipes_folder() / f"{name}.yaml").read_text().split("defaults:")[0]
    assert re.search(r"arXiv \d{4}\.\d{5}|DFlash recipe|AngelSlim|No published method", head)
    assert f"dflash fit {name}" in head


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_option_says_what_it_is(group: str, option: str) -> None:
    assert len(summary_of(recipes_folder() / group / f"{option}.yaml")) > 10


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_checks(name: str, files: list[str]) -> None:
    check_recipe(load_recipe(name, files))


@pytest.mark.parametrize("name", BENCH)
def test_recipe_of_the_bench_checks_with_its_own_rows(name: str, files: list[str]) -> None:
    check_recipe(load_recipe(name, [f for f in files if f.startswith("target.")]))


@pytest.mark.parametrize(("group", "option"), [(g, o) for g, o in OPTIONS if g != "callbacks"])
def test_every_option_checks_in_the_base_recipe(
    group: str, option: str, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (group, option) == ("logger", "wandb"):
        (tmp_path / "packages" / "wandb").mkdir(parents=True)
        (tmp_path / "packages" / "wandb" / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path / "packages")
    check_recipe(load_recipe("dflash", [f"{group}={option}", *PARTNERS.get((group, option), []), *files]))


@pytest.mark.parametrize("name", RECIPES)
def test_shown_recipe_loads_to_an_equal_one(name: str, files: list[str], tmp_path: Path) -> None:
    cfg = load_recipe(name, [*files, "data.chat_template_kwargs={mode: '1e-4', flag: 'off'}", "seed=7"])
    shown = tmp_path / "shown.yaml"
    shown.write_text(recipe_text(cfg))
    again = load_recipe(str(shown))
    assert recipe_text(again) == shown.read_text()
    expected, got = (OmegaConf.to_container(c, resolve=True) for c in (cfg, again))
    expected["target"].pop("suggested", None)  # has gone into the settings that read it
    assert got == expected
    assert got["data"]["chat_template_kwargs"] == {"mode": "1e-4", "flag": "off"}  # text stays text
    check_recipe(again)


def test_paper_settings_of_the_base_recipe() -> None:
    """DFlash sec. 7.1, and what differs by target."""
    cfg = load_recipe("dflash")
    assert (cfg.block.block_size, cfg.block.num_anchors, cfg.drafter.num_layers) == (16, 512, 5)
    assert (cfg.conditioning.num_features, cfg.loss.cross_entropy.decay, cfg.optim.lr) == (5, 7.0, 6e-4)
    assert (cfg.trainer.gradient_clip_val, cfg.optim.warmup_fraction, cfg.trainer.max_epochs) == (1.0, 0.04, 6)
    assert (cfg.data.max_length, cfg.data.row_blocks) == (3072, 512)
    assert load_recipe("dflash", ["block.num_anchors=100", "target=a/b"]).data.row_blocks == 512
    llama = load_recipe("dflash", ["target=llama31_8b"])
    assert (llama.block.block_size, llama.loss.cross_entropy.decay) == (10, 5.0)
    coder = load_recipe("dflash", ["target=qwen3_coder_30b"])
    assert (coder.drafter.num_layers, coder.data.max_length) == (8, 4096)


def test_published_settings_of_the_markov_head() -> None:
    """MT 3.2 d: blocks of 7 that all predict, rank 256, decay 4, 10 epochs, rows of 4096 tokens."""
    cfg = load_recipe("dspark")
    assert (cfg.block.block_size, cfg.block.label_layout, cfg.block.num_anchors) == (7, "anchor_first", 512)
    assert (cfg.head.rank, cfg.drafter.num_layers, cfg.conditioning.num_features) == (256, 5, 5)
    assert {term.decay for term in cfg.loss.values()} == {4.0}
    assert (cfg.optim.lr, cfg.trainer.max_epochs, cfg.data.max_length) == (6e-4, 10, 4096)
    assert cfg.optim.get("weight_decay", 0.0) == 0.0


def test_published_settings_of_the_walk_through_candidates() -> None:
    """MH 1.5: Qwen3-8B, blocks of 16, 8 candidates, the network's sizes, the base recipe's weights."""
    cfg = load_recipe("lilicorr", ["target=qwen3_8b"])
    head, loss = LatticeHead(**{k: v for k, v in cfg.head.items() if k != "_target_"}), cfg.loss
    assert (cfg.block.block_size, cfg.block.num_anchors, cfg.drafter.num_layers) == (16, 512, 5)
    assert (head.candidates, head.hidden_size, head.num_layers, head.num_heads) == (8, 1024, 2, 8)
    assert (head.mlp_ratio, head.factor_dim, head.logit_scale, head.vector_eps) == (2.0, 1024, 8.0, 1e-4)
    assert (loss.cross_entropy.view, loss.cross_entropy.decay) == ("base", 7.0)
    assert (loss.lattice.cross_entropy, loss.lattice.penalty, loss.lattice.get("hinge", 0.0)) == (0.25, 0.25, 0.0)
    assert (cfg.optim.lr, cfg.optim.warmup_fraction, cfg.trainer.max_epochs, cfg.data.max_length) == (
        6e-4,
        0.04,
        6,
        3072,
    )
    assert cfg.optim.get("weight_decay", 0.0) == 0.0 and cfg.trainer.gradient_clip_val == 1.0


def test_published_settings_of_the_selector() -> None:
    """MT 3.4 d, MH 2.1: blocks of 8, 5 layers, kernels of 2 over groups of 16, 16 candidates, rank 256."""
    cfg = load_recipe("dflash2")
    drafter = ConvTransformer(**{k: v for k, v in cfg.drafter.items() if k != "_target_"})
    assert (cfg.block.block_size, drafter.num_layers, drafter.is_causal) == (8, 5, False)
    assert (drafter.kernel_size, drafter.group_size, drafter.projection_std) == (2, 16, 0.0)
    assert (cfg.head.candidates, cfg.head.rank) == (16, 256)
    selected = cfg.loss.candidate_cross_entropy
    assert (selected.missing, selected.divide, selected.get("coefficient", 1.0)) == ("drop", "covered", 1.0)
    assert (cfg.optim.lr, list(cfg.optim.betas), cfg.block.num_anchors) == (6e-4, [0.9, 0.95], 256)


# -- loading ----------------------------------------------------------------------------------------------------------


def test_a_file_in_any_folder_derives_from_a_shipped_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my recipes"
    (folder / "optim").mkdir(parents=True)
    (folder / "optim" / "mine.yaml").write_text("defaults: [adamw, _self_]\nlr: 3e-4\n")
    (folder / "mine.yaml").write_text("defaults: [dflash, override optim: mine, _self_]\nseed: 3\n")
    monkeypatch.chdir(tmp_path)
    cfg = load_recipe("my recipes/mine.yaml", ["drafter=warm_start"])
    assert (cfg.optim.lr, cfg.seed, cfg.drafter.init_from_target) == (3e-4, 3, True)
    assert (cfg.name, cfg.run_dir) == ("mine", "runs/mine")


def test_a_run_folder_is_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe_text(load_recipe("quickstart", ["seed=5"])))
    assert load_recipe(str(tmp_path), ["optim.lr=1"]).seed == 5


def test_no_packaged_configuration_takes_the_place_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra searches pkg://hydra.conf before the folder it is given; a folder put there stands in for it."""
    initialize = sys.modules["hydra.initialize"]
    make_search_path = initialize.create_config_search_path  # type: ignore[attr-defined]

    def with_packaged(**named: Any) -> Any:
        search_path = make_search_path(**named)
        search_path.prepend("packaged", f"file://{tmp_path / 'packaged'}")
        return search_path

    monkeypatch.setattr(initialize, "create_config_search_path", with_packaged)
    (tmp_path / "packaged").mkdir()
    (tmp_path / "packaged" / "recipe.yaml").write_text("seed: 99\n")
    run = tmp_path / "it's a run"
    run.mkdir()
    (run / "recipe.yaml").write_text(recipe_text(load_recipe("quickstart", ["seed=5"])))
    assert load_recipe(str(run)).seed == 5


def test_a_shipped_name_means_the_shipped_recipe_wherever_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dflash").mkdir()
    (tmp_path / "dflash" / "recipe.yaml").write_text("defaults: [dflash, _self_]\nseed: 8\n")
    (tmp_path / "smoke").write_text("seed: 9\n")
    monkeypatch.chdir(tmp_path)
    assert (load_recipe("dflash").seed, load_recipe("smoke").seed, load_recipe("./dflash").seed) == (0, 0, 8)
    with pytest.raises(RecipeError, match=r"dflsh: no recipe .* of your own is written NAME\.yaml or \./NAME"):
        load_recipe("dflsh")


def test_own_options_go_before_shipped_ones(tmp_path: Path) -> None:
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "adamw.yaml").write_text("lr: 5.0\n")
    (tmp_path / "mine.yml").write_text("defaults: [dflash, _self_]\n")
    cfg = load_recipe(str(tmp_path / "mine.yml"))  # .yml is read as .yaml is
    assert (cfg.optim, cfg.name) == ({"lr": 5.0}, "mine")


@pytest.mark.parametrize("recipe", ["smoke.yaml", "mine.yaml"])
def test_a_file_that_includes_itself_is_named(recipe: str, tmp_path: Path) -> None:
    for name in ("smoke.yaml", "mine.yaml"):
        (tmp_path / name).write_text("defaults: [smoke, _self_]\n")
    with pytest.raises(RecipeError, match=r"1 fault in (?s:.*)/smoke\.yaml: includes itself.*Rename it"):
        load_recipe(str(tmp_path / recipe))


def test_files_that_include_each_other_are_one_error(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: [b]\n")
    (tmp_path / "b.yaml").write_text("defaults: [a]\n")
    with pytest.raises(RecipeError, match=r"a\.yaml: its defaults.*lead back to themselves"):
        load_recipe(str(tmp_path / "a.yaml"))


def test_an_alias_inside_its_own_anchor_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [dflash, _self_]\nx: &a [*a]\n")
    with pytest.raises(RecipeError, match=r"mine\.yaml:2: \*a stands inside what it names"):
        load_recipe(str(file))
    (tmp_path / "other.yaml").write_text("defaults: [mine, _self_]\n")
    with pytest.raises(RecipeError, match=r"other\.yaml: .*aliases in a file they name, lead back to themselves"):
        load_recipe(str(tmp_path / "other.yaml"))


def test_every_file_behind_a_source_is_listed_by_its_key(tmp_path: Path, files: list[str]) -> None:
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        (tmp_path / name).write_text("{}\n")
    train = f"data.train=[{{path:'{tmp_path}/[ab].jsonl',weight:0.5}},'{tmp_path}/c.jsonl']"
    cfg = load_recipe("dflash", [*files, train])
    check_recipe(cfg)
    found = {where: path.name for where, path in data_files(cfg).items() if where.startswith("data.")}
    assert found == {
        f"data.train[0]: {tmp_path}/a.jsonl": "a.jsonl",
        f"data.train[0]: {tmp_path}/b.jsonl": "b.jsonl",
        "data.train[1]": "c.jsonl",
    }
    assert OmegaConf.create(recipe_text(cfg)).data.train[0].weight == 0.5


@pytest.mark.parametrize("source", ["Qwen/Qwen3-1.7B", "/models/a b=c, [d]", "./x.gguf"])
def test_target_takes_a_path_or_hub_id_in_place_of_an_option(source: str) -> None:
    cfg = load_recipe("dflash", [f"target={source}"])
    assert cfg.target.source == source
    assert cfg.block.block_size == 16


def test_swapping_an_option_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    """Hydra merges an overriding group into what a recipe says of the old one; then it is reported."""
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "other.yaml").write_text("_target_: dflash_lightning.drafter.BlockTransformer\n")
    (tmp_path / "mine.yaml").write_text("defaults: [dflash, override drafter: other, _self_]\n")
    assert dict(load_recipe(str(tmp_path / "mine.yaml")).drafter) == {
        "_target_": "dflash_lightning.drafter.BlockTransformer"
    }


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"quikstart: no recipe of that name is shipped. Did you mean 'quickstart'\?"):
        load_recipe("quikstart")
    with pytest.raises(
        RecipeError, match=r"Did you mean 'dflash', 'dflash2' or '\w+'\? `dflash recipes` lists all; a f"
    ):
        load_recipe("dflsh")
    with pytest.raises(
        RecipeError, match=r"mine\.yaml: no such file. Give a YAML file, or a .* `dflash recipes` lists"
    ) as e:
        load_recipe("./mine.yaml")
    assert len(str(e.value)) < 250  # and not a hundred names


def test_missing_file_is_named() -> None:
    with pytest.raises(RecipeError, match=r"nowhere/mine\.yaml: no such file"):
        load_recipe("nowhere/mine.yaml")


def test_all_faults_of_a_command_line_are_reported_at_once() -> None:
    overrides = ["lr", "target=qwen3_4bb", "seed=1,2", "loss=nope", "optim=adam"]
    with pytest.raises(RecipeError, match="5 faults in dflash") as caught:
        load_recipe("dflash", overrides)
    text = str(caught.value)
    assert "lr: cannot be read as an override" in text
    assert "target=qwen3_4bb: no such option, and no such path. Did you mean 'qwen3_4b'?" in text
    assert "seed=1,2: names several values" in text
    assert re.search(
        r"loss=nope: no such option in the shipped loss/\. Allowed: .*cross_entropy.* Options of your own", text
    )
    assert "optim=adam: no such option in the shipped optim/. Did you mean 'adamw'?" in text


def test_numbers_that_yaml_reads_as_others_are_refused(tmp_path: Path) -> None:
    """1:00:00:00 is 216000 and 0010 is 8 in YAML 1.1; 6e-4 is a number here."""
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [dflash, _self_]\ntrainer:\n  max_time: 1:00:00:00\n  max_epochs: 0010\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(file))
    assert "mine.yaml:3: YAML reads 1:00:00:00 as 216000" in str(caught.value)
    assert "mine.yaml:4: YAML reads 0010 as 8" in str(caught.value)
    file.write_text('defaults: [dflash, _self_]\ntrainer: {max_time: "1:00:00:00"}\noptim: {lr: 6e-4}\n')
    cfg = load_recipe(str(file))
    assert (cfg.trainer.max_time, cfg.optim.lr) == ("1:00:00:00", 6e-4)


def test_broken_yaml_names_the_place(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [dflash\nseed: 3\n")
    with pytest.raises(RecipeError, match=r"is no valid YAML .*line 2"):
        load_recipe(str(tmp_path / "mine.yaml"))


# -- checking ---------------------------------------------------------------------------------------------------------


def test_every_fault_is_reported_at_once(files: list[str]) -> None:
    text = _faults(
        "smoke",
        [
            *files,
            "optim.learning_rte=1e-3",
            "optim.lr=abc",
            "trainer.max_time=216000",
            "block._target_=dflash_lightning.block.Anchord",
            "draftr.num_layers=3",
            "data.limit='5'",
            "callbacks.speculative_eval.lossless_prompts=2.5",
        ],
    )
    assert text.startswith("7 faults in recipe 'smoke'")
    slip = (
        "optim.learning_rte: unknown key of dflash_lightning.module.OptimSettings. Did you mean 'optim.lr'? Allowed: "
    )
    assert f"{slip}betas" in text
    assert "optim.lr: 'abc' (str) does not fit; allowed: number. Write a number, e.g. 6e-4." in text
    assert "trainer.max_time: 216000 (int) does not fit" in text and '"DD:HH:MM:SS"' in text
    assert "block._target_: 'dflash_lightning.block.Anchord' does not import" in text and "but 'Anchored'" in text
    assert "draftr: unknown key. Did you mean 'drafter'?" in text
    assert "data.limit: '5' (str) does not fit; allowed: whole number or null. Write it without quotes: 5." in text
    assert "callbacks.speculative_eval.lossless_prompts: 2.5 (float) does not fit; allowed: whole number" in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.max_lenght=64", r"data\.max_lenght: unknown key of .*DraftData\. Did you mean 'max_length'\?"),
        ("~data.train", r"data\.train: required by dflash_lightning\.data\.DraftData\. Set data\.train"),
        ("data.train=???", r"data\.train: required, and the recipe leaves it open\. Add data\.train=VALUE"),
        ("data.train=nowhere.jsonl", r"data\.train: nowhere\.jsonl is not a file"),
        ("data.train=package://no_such_package/a.jsonl", r"data\.train: .*'no_such_package' is not installed"),
        ("data.train=[nowhere.jsonl]", r"data\.train\[0\]: nowhere\.jsonl is not a file"),
        ("data.train=[{path:nowhere.jsonl,weight:2}]", r"data\.train\[0\]: nowhere\.jsonl is not a file"),
        ("data.train={path:nowhere.jsonl}", r"data\.train: nowhere\.jsonl is not a file"),
        (
            "data.train=[{path:a,wieght:2}]",
            r"data\.train\[0\]\.wieght: unknown key of a source\. Did you mean 'weight'",
        ),
        ("data.train=[{path:a,weight:0}]", r"data\.train\[0\]\.weight: 0 is not how often"),
        ("data.train='no*.jsonl'", r"data\.train: no file matches no\*\.jsonl"),
        ("data.train=3", r"data\.train: 3 \(int\) does not fit; allowed: text or mapping"),
        ("data.truncate=middle", r"data\.truncate: 'middle' .* allowed: one of 'right', 'left', 'drop'"),
        ("callbacks.speculative_eval.prompts=gone.jsonl", r"callbacks\.speculative_eval\.prompts: gone\.jsonl is not"),
        ("target.source=/no/such/model", r"target.*there is no file or folder /no/such/model"),
        ("trainer.callbacks=[]", r"trainer\.callbacks: would be ignored.*name callbacks in the group callbacks"),
        ("loss.other.decay=3", r"loss\.other: has no _target_, only \['decay'\]"),
        (
            "head._target_=dflash_lightning.block.Anchored",
            r"head\._target_: .* makes a Anchored\. head takes a DraftHead",
        ),
        ("drafter=null", r"drafter=null: a group takes an option, not null\. Allowed: block_transformer"),
        ("block.block_size=1", r"block\.block_size: 1 .*2 or more"),
        ("optim.lr=0", r"optim\.lr: 0\.0 does not move the weights"),
        ("decoding.max_new_tokens=0", r"decoding\.max_new_tokens: 0 decodes nothing"),
        ("optim.betas=[0.9]", r"optim\.betas: \[0\.9\] \(list\) does not fit; allowed: list of 2: number, number"),
        ("trainer.max_epochs=1e4", r"trainer\.max_epochs: 10000\.0 \(float\) does not fit.*Write 10000\."),
        (
            "data.packing=off",
            r"data\.packing: 'off' \(str\) does not fit; allowed: true or false\. Write true or false",
        ),
        ("optim.lr={a: 1}", r"optim\.lr: \{'a': 1\} \(dict\) does not fit; allowed: number"),
        ("drafter._target_=null", r"drafter\._target_: None does not import"),
        ("init_from=None", r"init_from: 'None' \(str\) does not fit.*write null"),
        ("seed=${nope.seed}", r"seed: '\$\{nope\.seed\}' cannot be resolved.*Set it: seed=VALUE"),
        ("target.suggested.blocksize=4", r"target\.suggested\.blocksize: unknown key\. Did you mean 'block_size'\?"),
        ("callbacks=[checkpoint]", r"callbacks\.best\.monitor: 'decode/tau' is never measured"),
        ("optim.lr=inf", r"optim\.lr: inf holds inf, which is no quantity\. Write a finite number"),
        ("optim.lr=1e400", r"optim\.lr: inf holds inf"),
        ("optim.lr=nan", r"optim\.lr: nan holds nan"),
        ("optim.lr=true", r"optim\.lr: True \(bool\) does not fit; allowed: number"),
        ("optim.lr='1e-3'", r"optim\.lr: '1e-3' \(str\) does not fit.*without quotes"),
        ("optim.betas=[0.9,.inf]", r"optim\.betas: \[0\.9, inf\] holds inf|'\.inf'"),
        ("optim.betas=[0.9,1.5]", r"optim\.betas: 1\.5 is not 0 or more and below 1"),
        ("optim.weight_decay=-1", r"optim\.weight_decay: -1 is not 0 or more"),
        ("optim.final_fraction=2", r"optim\.final_fraction: 2 is not between 0 and 1"),
        ("trainer.gradient_clip_val=-1", r"trainer\.gradient_clip_val: -1 is not 0 or more.*null does not clip"),
        ("data.num_workers=-1", r"data\.num_workers: -1 is not 0 or more"),
        ("trainer.val_check_interval=inf", r"trainer\.val_check_interval: inf holds inf"),
        ("~loss.cross_entropy", r"loss: no term is given, so there is nothing to train on\. Add one"),
        (
            "trainer.plugins=[{_target_: no.such.Plugin}]",
            r"trainer\.plugins\[0\]\._target_: 'no\.such\.Plugin' does not",
        ),
        ("~head", r"head: missing"),
        (
            "logger=wandb",
            r"logger: the Python package wandb is not installed\. Run: pip install wandb; or use logger=csv",
        ),
        ("decoding.top_k=5", r"decoding\.top_k: 5 would be ignored at temperature 0"),
        ("seed=-1", r"seed: -1 is not between 0 and 4294967295\. Set a whole number"),
        ("seed=4294967296", r"seed: 4294967296 is not between 0 and 4294967295"),
        ("trainer.accumulate_grad_batches=0", r"trainer\.accumulate_grad_batches: 0 is not 1 or more"),
        ("data.row_blocks=0", r"data\.row_blocks: 0 is not 1 or more.*null sets no limit"),
        (
            "callbacks.speculative_eval.limit=0",
            r"callbacks\.speculative_eval\.limit: 0 is not 1 or more.*null uses all",
        ),
        ("decoding.temperature=-1", r"decoding\.temperature: -1\.0 is not >= 0"),
        (
            "callbacks.best.every_n_train_steps=50",
            r"callbacks\.best\.every_n_train_steps: saves when 'decode/tau' may be of older weights\. Remove it",
        ),
        (
            "callbacks.best.save_on_train_epoch_end=true",
            r"callbacks\.best\.save_on_train_epoch_end: saves when 'decode/tau' may be of older weights\. Set it to",
        ),
    ],
)
def test_fault_says_where_what_and_what_to_do(override: str, message: str, files: list[str]) -> None:
    with pytest.raises(RecipeError, match=re.compile(message, re.DOTALL | re.IGNORECASE)):
        check_recipe(load_recipe("smoke", [*files, override]))


def test_recipe_that_leaves_data_open_names_both_keys() -> None:
    text = _faults("dflash", ["target=custom"])
    for key in ("target.source", "data.train", "callbacks.speculative_eval.prompts"):
        assert f"{key}: required, and the recipe leaves it open. Add {key}=VALUE to the command" in text


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (1, float, True),
        (1.0, int, False),
        (True, int, False),
        (True, float, False),
        ("1e-4", float, False),
        (None, int | None, True),
        ("ram", Literal["ram"] | None, True),
        ("rom", Literal["ram"] | None, False),
        (1, Literal[True], False),
        (216000, str | timedelta | dict[str, int] | None, False),
        ([0.9, 0.95], tuple[float, float], True),
        ([0.9], tuple[float, float], False),
        ([1, 2], tuple[int, ...], True),
        ([1, "2"], list[int], False),
        ("text", list[str], False),
        ({"a": 1}, dict[str, int], True),
        ({"a": "1"}, dict[str, int], False),
        ("anything", Any, True),
        ("a", Path, True),
        ({}, Callable, False),
    ],
)
def test_values_fit_their_hints(value: Any, hint: Any, expected: bool) -> None:
    assert fits(value, hint) is expected


def test_values_become_the_type_that_was_asked_for() -> None:
    assert conform([0, 0.95], tuple[float, float]) == (0.0, 0.95)
    assert isinstance(conform(1, float | None), float)
    assert isinstance(conform(1, float | int), int)
    assert conform([1, 2], list[int]) == [1, 2]
    assert conform(None, float | None) is None


def test_hints_are_put_in_words() -> None:
    assert describe(float | None) == "number or null"
    assert describe(tuple[float, float]) == "list of 2: number, number"
    assert describe(Literal["a", "b"]) == "one of 'a', 'b'"
    assert advice("6e-4", float) == "write it without quotes: 6e-4"
    assert advice("None", int | None) == "'None' is text in YAML: write null"


# -- building ---------------------------------------------------------------------------------------------------------


def test_building_makes_the_target_once_and_hands_it_over(
    files: list[str], monkeypatch: pytest.MonkeyPatch, make_target: Callable[..., Any]
) -> None:
    made: list[Any] = []

    def load(source: str, *, dtype: str = "float32") -> Any:
        made.append(make_target("llama"))
        return made[-1]

    monkeypatch.setattr("dflash_lightning.target.load_target", load)
    parts = build_recipe(load_recipe("smoke", files))
    assert len(made) == 1
    assert parts.module.target is parts.data.target is parts.target is made[0]
    names = [type(callback).__name__ for callback in parts.trainer.callbacks]
    assert names.count("ModelCheckpoint") == 2 and "SpeculativeEval" in names
    assert parts.trainer.max_epochs == 2


def test_settings_that_lightning_refuses_are_known_before_the_target_is_loaded(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(source: str, *, dtype: str = "float32") -> Any:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("dflash_lightning.target.load_target", load)
    with pytest.raises(RecipeError, match=r"trainer: .*strategy"):
        build_recipe(load_recipe("smoke", [*files, "trainer.strategy=ddpp"]))
    with pytest.raises(RecipeError, match=r"trainer: .*fast_dev_run"):
        build_recipe(load_recipe("smoke", [*files, "trainer.fast_dev_run=-1"]))
    for devices in ("foo", "[0,0]"):
        with pytest.raises(RecipeError, match=r"trainer: .*(devices|CPU)"):
            build_recipe(load_recipe("smoke", [*files, f"trainer.devices={devices}"]))
