"""``dflash export``, ``check`` and ``generate`` as a user types them, on folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_lightning.cli import main
from dflash_lightning.export import FORMATS
from dflash_lightning.model import save_draft


@pytest.fixture(scope="module")
def place(tmp_path_factory, make_target, make_draft, byte_tokenizer) -> Path:
    """A folder with a tiny target and a drafter made for it."""
    place = tmp_path_factory.mktemp("work")
    target = make_target("qwen3")
    target.model.save_pretrained(place / "target")
    byte_tokenizer.save_pretrained(place / "target")
    save_draft(make_draft(target, init_std=0.05), place / "draft")
    (place / "prompts.jsonl").write_text('{"turns": ["tell me"]}\n{"turns": ["and now"]}\n')
    return place


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folders(place) -> dict[str, Path]:
    for name in FORMATS:
        arguments = ("--draft", place / "draft", "--target", place / "target", "--prompts", place / "prompts.jsonl")
        status = run("export", *arguments, "--format", name, "--out", place / name, "--max-new-tokens", 12)
        assert status == 0
    return {name: place / name for name in FORMATS}


@pytest.mark.parametrize("format", FORMATS)
def test_every_folder_is_checked_and_generates_what_its_replay_has(place, folders, format, capsys):
    """The target is named by the folder itself in `check`, and by --target in `generate`."""
    assert run("check", folders[format], "--target", place / "target") == 0
    assert ": OK" in capsys.readouterr().out
    replay = json.loads((folders[format] / "replay.json").read_text())["prompts"][0]
    ids = ",".join(map(str, replay["prompt_ids"]))
    arguments = ("--target", place / "target", "--prompt-ids", ids, "--max-new-tokens", 12, "--eager", "--json")
    assert run("generate", "--draft", folders[format], *arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["output_ids"], answer["committed"]) == (replay["output_ids"], replay["committed"])


def test_check_finds_the_target_by_the_name_in_the_replay(folders, capsys):
    assert run("check", folders["zlab"]) == 0


def test_a_damaged_folder_is_exit_status_1_with_the_cause_in_a_line(place, folders, tmp_path, capsys):
    folder = tmp_path / "x"
    folder.mkdir()
    for file in folders["zlab"].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    raw = json.loads((folder / "config.json").read_text())
    raw["dflash_config"]["target_layer_ids"] = [1, 3]
    (folder / "config.json").write_text(json.dumps(raw))
    assert run("check", folder, "--target", place / "target") == 1
    out = capsys.readouterr().out
    assert "DIFFERS" in out and "CAUSE  target layers [0, 2] instead of [1, 3]: layer ids are off by one" in out


def test_export_prints_the_serve_command_and_will_not_overwrite(place, folders, capsys):
    arguments = ("--draft", place / "draft", "--target", place / "target", "--format", "vllm", "--max-new-tokens", 4)
    assert run("export", *arguments, "--out", place / "another") == 0
    out = capsys.readouterr().out
    assert f"vllm serve {place / 'target'} --speculative-config" in out and '"num_speculative_tokens": 3' in out
    assert run("export", *arguments, "--out", place / "another") == 2
    assert "exists" in capsys.readouterr().err


def test_what_an_engine_drafted_is_read_from_a_file(place, folders, tmp_path, capsys):
    replay = json.loads((folders["sglang"] / "replay.json").read_text())
    seen = [{"prompt_ids": p["prompt_ids"], "draft_ids": p["draft_ids"]} for p in replay["prompts"]]
    (tmp_path / "engine.json").write_text(json.dumps({"prompts": seen}))
    arguments = ("check", folders["sglang"], "--target", place / "target", "--observed")
    assert run(*arguments, tmp_path / "engine.json") == 0
    seen[0]["draft_ids"] = [5, 5, 5]
    (tmp_path / "engine.json").write_text(json.dumps({"prompts": seen}))
    assert run(*arguments, tmp_path / "engine.json") == 1
    assert "the engine's first blocks do not come out" in capsys.readouterr().out
