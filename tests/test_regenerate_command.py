"""``dflash regenerate`` as a user types it: what it says about rows that went wrong, drafts, and being stopped."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_lightning.cli import main
from dflash_lightning.decoding import SpeculativeDecoder
from dflash_lightning.model import DraftModel, save_draft
from dflash_lightning.target import FrozenTarget, load_target


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_tiny_model: Callable[..., Any], byte_tokenizer: Any
) -> Path:
    """A working folder with a tiny target and a file of five prompts, of which one is broken and one too long."""
    make_tiny_model("llama").save_pretrained(tmp_path / "target")
    byte_tokenizer.save_pretrained(tmp_path / "target")
    rows = [json.dumps({"turns": [text]}) for text in ("one", "two", "x" * 600, "three")]
    (tmp_path / "prompts.jsonl").write_text("\n".join([*rows, '{"turns"']))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*more: str) -> list[str]:
    sizes = ["--max-new-tokens", "8", "--batch-size", "1"]
    return ["regenerate", "prompts.jsonl", "--target", "./target", "--out", "out.jsonl", *sizes, *more]


def test_the_outcome_names_what_was_not_answered_and_where_to_look(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command()) == 0
    said = capsys.readouterr()
    assert "out.jsonl: 3 of 5 prompts answered, " in said.out
    assert "2 prompts without answer, 0 with some turns unanswered: see out.jsonl.failed.jsonl" in said.out
    assert "2 prompts cannot be asked, the first: line 3: a prompt of 619 tokens does not fit" in said.err
    assert [json.loads(line)["line"] for line in (here / "out.jsonl.failed.jsonl").read_text().splitlines()] == [3, 5]
    assert main(command()) == 0
    assert "3 of 5 prompts answered (3 before this call)" in capsys.readouterr().out


def test_a_stopped_command_says_that_it_can_go_on(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, calls = SpeculativeDecoder.decode, []

    def stopped(decoder: SpeculativeDecoder, *args: Any, **settings: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return decode(decoder, *args, **settings)

    monkeypatch.setattr(SpeculativeDecoder, "decode", stopped)
    assert main(command()) == 130
    assert "2 of 4 prompts are answered and kept; the same command goes on from there" in capsys.readouterr().err
    assert main(command()) == 0
    assert "3 of 5 prompts answered (2 before this call)" in capsys.readouterr().out


def test_a_draft_is_measured_and_the_verdict_said(
    here: Path, make_draft: Callable[..., DraftModel], capsys: pytest.CaptureFixture[str]
) -> None:
    target: FrozenTarget = load_target(str(here / "target"))
    save_draft(make_draft(target), here / "draft")
    assert main(command()) == 0
    plain = (here / "out.jsonl").read_bytes()
    assert main(command("--out", "drafted.jsonl", "--draft", "draft", "--eager")) == 0
    assert "tokens/s with it" in capsys.readouterr().err
    assert (here / "drafted.jsonl").read_bytes() == plain
    assert json.loads((here / "drafted.jsonl.meta.json").read_text())["draft"]["rows"] == 3


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--top-p", "0.9"], "--top-p: 0.9 would be ignored at temperature 0"),
        (["--top-k", "5"], "--top-k: 5 would be ignored at temperature 0"),
        (["--draft", "nowhere"], "--draft: there is no nowhere"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(
    here: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main(command(*more)) == 2
    assert message in capsys.readouterr().err
    assert not (here / "out.jsonl.meta.json").exists()


@pytest.mark.parametrize("name", [".", "/dev/null", ""])
def test_a_name_under_which_no_rows_can_be_kept_is_refused_before_the_target_is_read(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("dflash_lightning.commands.regenerate.open_target", None)
    assert main([*command(), "--out", name]) == 2
    assert f"--out: {name or 'an empty name'} is no file of rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        (None, "out.jsonl is there, and is not known to be of dflash regenerate (it has no out.jsonl.meta.json)"),
        ("{", "out.jsonl.meta.json is damaged"),
        ("[]", "out.jsonl.meta.json is damaged"),
        ('{"made_with": 1, "complete": false}', "out.jsonl.meta.json is damaged"),
        ('{"made_with": {}, "complete": true}', "out.jsonl.meta.json is damaged"),
        ('{"made_with": {}, "complete": true, "counts": {"x": 1}}', "out.jsonl.meta.json is damaged"),
    ],
)
def test_a_file_of_others_is_kept(here: Path, capsys: pytest.CaptureFixture[str], meta: str | None, said: str) -> None:
    (here / "out.jsonl").write_text("precious")
    if meta is not None:
        (here / "out.jsonl.meta.json").write_text(meta)
    assert main(command()) == 2
    assert said in capsys.readouterr().err
    assert (here / "out.jsonl").read_text() == "precious"
