"""What ``--draft`` and ``init_from`` take: run folders, checkpoints, exports; and what a continued run keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dflash_lightning import draft_config
from dflash_lightning.cli import main
from dflash_lightning.commands.drafts import find_draft
from dflash_lightning.model import files as model_files
from dflash_lightning.model import save_draft
from dflash_lightning.model.found import find_draft_config, find_weights
from dflash_lightning.target import hub

SMOKE = ["smoke", "target.source=target", "data.max_length=96", "callbacks.speculative_eval.prompts=prompts.jsonl"]


@pytest.fixture(scope="module")
def place(make_run) -> Path:
    """A folder with a target, rows of two kinds, and a run ``runs/a`` of the first with a reduced vocabulary."""
    rows = {f"{name}.jsonl": f"{text} {text} {text}" for name, text in (("a", "abc"), ("b", "xyz"))}
    return make_run("llama", rows, *SMOKE, "data.train=a.jsonl", "draft_vocabulary=data")


@pytest.fixture
def here(place, monkeypatch) -> Path:
    monkeypatch.chdir(place)
    return place


def export_to(out: str) -> None:
    """Run a, in the one format that holds a part of the vocabulary."""
    arguments = ["--format", "speculators", "--out", out, "--max-new-tokens", "8", "--replace"]
    assert main(["export", "--draft", "runs/a", *arguments]) == 0


def ids_of(run: str) -> list[int]:
    return find_draft(run).model.draft_vocab.tolist()


def test_a_run_folder_is_its_best_checkpoint_with_what_was_measured_of_it(here):
    found = find_weights("runs/a", setting="init_from")
    assert found.source == Path("runs/a/checkpoints/best.ckpt")
    stored = torch.load(found.source, weights_only=True)
    assert found.measured["step"] == stored["global_step"] and found.measured["decode/tau"] >= 1
    assert find_weights("runs/a/checkpoints/last.ckpt", setting="init_from").source.name == "last.ckpt"


@pytest.mark.parametrize("start", ["runs/a", "ex"])
def test_a_run_is_continued_from_a_run_folder_or_an_export_with_its_own_tokens(here, capfd, start):
    """The rows are others, with other tokens: the drafter keeps those that it has, and says which it cannot learn."""
    if start == "ex":
        export_to("ex")
    run = f"run_dir=runs/b{len(start)}"
    arguments = ["data.train=b.jsonl", "draft_vocabulary=data", f"init_from={start}", run, "trainer.max_epochs=1"]
    with pytest.warns(UserWarning, match=r"keeps its own \d+ tokens; 2 of the \d+ that occur in data.train"):
        assert main(["fit", *SMOKE, *arguments]) == 0
    before, after = find_draft("runs/a").model, find_draft(run.removeprefix("run_dir=")).model
    assert after.draft_vocab.tolist() == before.draft_vocab.tolist()
    assert not torch.equal(after.conditioning.fc.weight, before.conditioning.fc.weight)
    assert not {ord(c) for c in "xyz"} & set(after.draft_vocab.tolist())


def test_a_part_of_the_vocabulary_is_exported_to_the_one_format_that_holds_it(here, capsys):
    """The others refuse it before the target is looked for."""
    for format in ("hf", "zlab", "sglang", "vllm"):
        assert main(["export", "--draft", "runs/a", "--format", format, "--out", "x", "--target", "/nowhere"]) == 2
        assert f"--format {format} cannot hold this drafter: the drafter knows 23 of 272" in capsys.readouterr().err
    export_to("ex")
    assert main(["check", "ex"]) == 0
    assert ids_of("ex") == ids_of("runs/a")
    capsys.readouterr()
    replay = json.loads(Path("ex/replay.json").read_text())["prompts"][0]
    ids = ",".join(map(str, replay["prompt_ids"]))
    arguments = ["--prompt-ids", ids, "--max-new-tokens", "8", "--eager", "--json"]
    assert main(["generate", "--draft", "ex", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["output_ids"] == replay["output_ids"]


def test_a_recipe_of_the_whole_vocabulary_does_not_continue_a_part_of_it(here, capsys):
    arguments = ["data.train=b.jsonl", "init_from=runs/a", "run_dir=runs/c"]
    assert main(["fit", *SMOKE, *arguments]) == 2
    assert "draft_vocabulary=data, and keeps the tokens that it has" in capsys.readouterr().err


def test_a_recipe_of_a_part_does_not_continue_the_whole_vocabulary(here, tiny_target, make_draft, capsys):
    save_draft(make_draft(tiny_target, num_layers=1), here / "whole")
    arguments = ["data.train=b.jsonl", "init_from=whole", "run_dir=runs/d", "draft_vocabulary=data"]
    assert main(["fit", *SMOKE, *arguments]) == 2
    assert "draft_vocabulary is 'data' in the recipe, the whole vocabulary there" in capsys.readouterr().err


def test_what_is_not_there_is_said_with_the_recipes_other_faults(here, capsys):
    """Before the target is loaded."""
    (here / "runs" / "empty").mkdir(parents=True, exist_ok=True)
    (here / "runs" / "empty" / "recipe.yaml").write_text("")
    for start, words in (
        ("runs/gone", "init_from: there is no runs/gone"),
        ("runs/empty", "init_from: runs/empty is a run without a checkpoint"),
        ("runs", "init_from: runs has neither recipe.yaml"),
    ):
        assert main(["fit", *SMOKE, "data.train=a.jsonl", "target.source=/nowhere", f"init_from={start}"]) == 2
        error = capsys.readouterr().err
        assert words in error and "/nowhere" in error, error


@pytest.mark.parametrize("start", ["runs/a", "runs/a/checkpoints/best.ckpt"])
def test_a_run_does_not_start_from_what_it_writes(here, capsys, start):
    """With --fresh the folder would be renamed before it is read."""
    arguments = [*SMOKE, "data.train=a.jsonl", f"init_from={start}", "run_dir=runs/a", "--fresh"]
    assert main(["fit", *arguments]) == 2
    assert f"init_from: {start} lies in run_dir=runs/a, which this run writes" in capsys.readouterr().err
    assert (here / "runs/a/checkpoints/best.ckpt").exists()


def test_a_name_of_two_words_may_be_a_hub_repository(here, monkeypatch):
    """Offline here, so it cannot be read; a path below a folder that exists is none, and is not looked for there."""

    def offline(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect")

    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    monkeypatch.setattr(model_files, "cached_file", offline)
    with pytest.raises(ValueError, match=r"--draft: there is no no/such here, nor could it be read as a hub repo"):
        find_draft("no/such")
    with pytest.raises(ValueError, match=r"--draft: there is no runs/such\. Give a run folder"):
        find_draft("runs/such")
    monkeypatch.setattr(hub, "hub_answers", lambda: False)
    with pytest.raises(
        ValueError, match=r"--draft: no/such is no file or folder here and not among .* be reached\. Give"
    ):
        find_draft("no/such")


@pytest.mark.parametrize("version", [2, 0, "2"])
def test_a_folder_of_an_unknown_contract_version_is_refused_before_its_weights_are_read(
    here, tmp_path, monkeypatch, version
):
    draft = find_draft("runs/a").model
    save_draft(draft, tmp_path / "now")
    assert "contract_version" not in (tmp_path / "now" / "config.json").read_text()
    monkeypatch.setattr(draft_config, "CONTRACT_VERSION", version)
    save_draft(draft, tmp_path / "later")
    monkeypatch.undo()
    monkeypatch.chdir(here)
    (tmp_path / "later" / "model.safetensors").unlink()
    fault = rf"later: the config states contract_version={version!r}, .* reads versions 1 to 1\. Upgrade"
    for find in (find_weights, find_draft_config):
        with pytest.raises(ValueError, match=fault):
            find(str(tmp_path / "later"), setting="--draft")


def test_a_checkpoint_of_a_later_contract_version_is_refused_wherever_it_is_read(here, tmp_path, monkeypatch):
    stored = torch.load("runs/a/checkpoints/last.ckpt", weights_only=True)
    assert "contract_version" not in stored["draft_config"]
    stored["draft_config"]["contract_version"] = 2
    torch.save(stored, tmp_path / "later.ckpt")
    for find in (find_weights, find_draft_config):
        with pytest.raises(ValueError, match=r"--draft: .*later\.ckpt: the config states contract_version=2, "):
            find(str(tmp_path / "later.ckpt"), setting="--draft")
    with pytest.raises(ValueError, match="contract_version=2"):  # by way of a resumed fit
        draft_config.DraftConfig.from_dict(stored["draft_config"])
    monkeypatch.setattr(draft_config, "CONTRACT_VERSION", 2)
    assert find_draft_config(str(tmp_path / "later.ckpt"), setting="--draft").draft_vocab_size == len(ids_of("runs/a"))
