"""The run folder and what reports are made of."""

from __future__ import annotations

import json
import math
import os
import platform
from pathlib import Path

import pytest

from dflash_lightning.machine import machine
from dflash_lightning.recipe import load_recipe
from dflash_lightning.run import RunFolder, json_text, read_recipe


def test_what_rank_0_is_writing_makes_the_folder_no_other_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 looks at the folder at every moment of rank 0's first writes, and after a crash in one of them."""
    (tmp_path / "rows.jsonl").write_text("{}")
    keys = ("data.train", "callbacks.speculative_eval.prompts")
    cfg = load_recipe("smoke", ["target.source=tiny", *(f"{key}={tmp_path / 'rows.jsonl'}" for key in keys)])
    folder, looks, replace = RunFolder(tmp_path / "run"), [], Path.replace

    def looked_at(path: Path, target: Path) -> Path:
        for act in (lambda: None, lambda: replace(path, target)):
            act()
            looks.append(sorted(file.name for file in folder.path.iterdir()))
            folder.check_same_run(cfg)
        return target

    monkeypatch.setattr(Path, "replace", looked_at)
    folder.begin(cfg)
    temporary = [f".{name}.{platform.node()}-{os.getpid()}.tmp" for name in ("recipe.yaml", "run.json")]
    assert looks == [[temporary[0]], ["recipe.yaml"], [temporary[1], "recipe.yaml"], ["recipe.yaml", "run.json"]]


def test_what_to_do_next_names_the_runs_own_prompts(tmp_path: Path) -> None:
    """The command can be pasted; only a run without evaluation leaves a word to fill in."""
    run, rows = RunFolder(tmp_path / "run"), tmp_path / "my rows.jsonl"
    rows.write_text("{}")
    words = ["target.source=tiny", f"data.train='{rows}'"]
    run.begin(load_recipe("smoke", [*words, f"callbacks.speculative_eval.prompts='{rows}'"]))
    assert run.next_command == f"dflash evaluate --draft {run.path} --prompts '{rows}'"
    run.begin(load_recipe("smoke", [*words, "~callbacks.speculative_eval"]))
    assert run.next_command == f"dflash evaluate --draft {run.path} --prompts FILE"


def test_a_folder_of_something_else_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / ".recipe.yaml.17.tmp").write_text("half a rec")
    RunFolder(tmp_path).check_same_run(load_recipe("smoke"))
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="exists and is no run folder"):
        RunFolder(tmp_path).check_same_run(load_recipe("smoke"))


def test_a_recipe_that_appears_during_the_look_is_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 writes all of its first files between two looks of rank 1."""
    cfg, iterdir = load_recipe("smoke"), Path.iterdir

    def and_then_rank_0_writes(path: Path) -> list[Path]:
        assert path == tmp_path
        found = list(iterdir(path))
        (path / "recipe.yaml").write_text("name: smoke")
        (path / "run.json").write_text("{}")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", and_then_rank_0_writes)
        RunFolder(tmp_path).check_same_run(cfg)


def test_reports_hold_null_where_there_is_no_number() -> None:
    text = json_text({"a": math.nan, "b": [1.5, math.inf, {"c": -math.inf}], "d": "NaN", "e": (0, True)})
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": None,
        "b": [1.5, None, {"c": None}],
        "d": "NaN",
        "e": [0, True],
    }


def test_the_machine_is_named() -> None:
    found = machine()
    assert found["threads"] >= 1 and found["cores"] >= 1
    listed = Path("/proc/cpuinfo")
    if listed.exists() and "model name" in listed.read_text():
        assert found["cpu"] in listed.read_text()
    assert found["cpu"]


def test_one_process_at_a_time_holds_the_lock_and_leaves_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "a")
    with folder.locked():
        with pytest.raises(ValueError, match=r"another dflash fit is writing .*a now"), folder.locked():
            pass
        with RunFolder(tmp_path / "runs" / "b").locked():
            pass
    with folder.locked():
        pass
    assert list((tmp_path / "runs").iterdir()) == []


def test_what_a_kill_left_of_a_checkpoint_is_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for name in (".last.ckpt.host-7.partial", "last.ckpt"):
        (tmp_path / "checkpoints" / name).write_text("x")
    RunFolder(tmp_path).remove_partial()
    assert [file.name for file in (tmp_path / "checkpoints").iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("text", ["{", "[]", '"x"'])
def test_a_damaged_state_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run\.json: damaged .*--fresh"):
        assert RunFolder(tmp_path).finished


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "cannot be read as a recipe"),
        ("- a", "is a mapping of settings, but this is a list"),
        ("5", "cannot be read as a recipe"),
        ("a: ${b}", "cannot be read as a recipe"),
        ("target: 5", "target is 5, but holds settings"),
        ("data: [1]", r"data is \[1\], but holds settings"),
        ("data: {chat_template_kwargs: x}", "data.chat_template_kwargs is 'x'"),
    ],
)
def test_a_recipe_that_is_none_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"recipe\.yaml: .*{message}"):
        read_recipe(tmp_path / "recipe.yaml")
