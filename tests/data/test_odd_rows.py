"""Spellings that data in the wild has: marks nested or unknown, roles of ShareGPT, keys twice, files of other kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_lightning.data.read.records import BadRecord, read_records
from dflash_lightning.data.read.rows import ChatRow, parse_record

USER = {"role": "user", "content": "q"}
TOOL = {"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}


def row(*messages: dict[str, Any], **columns: Any) -> ChatRow:
    found = parse_record({"messages": [USER, *messages], **columns}, "f:1")
    assert isinstance(found, ChatRow)
    return found


def answer(**more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "a", **more}


@pytest.mark.parametrize(
    "mark", [{"metadata": {"train": False}}, {"has_loss": 0}, {"content": [{"type": "text", "text": "a", "weight": 0}]}]
)
def test_a_mark_that_is_not_read_is_refused(mark: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"message 2 has .* which may mark an answer"):
        row(answer(**mark))


@pytest.mark.parametrize("note", [{"metadata": {"weight": 70}}, {"metadata": {"train": True}}, {"train_loss": 0.37}])
def test_notes_that_are_no_marks_are_let_be(note: dict[str, Any]) -> None:
    assert row(answer(**note)).unlearned == frozenset()


@pytest.mark.parametrize(
    "reason",
    [
        {"finish_reason": {"type": "length", "length": 5}},
        {"meta_info": {"finish_reason": {"type": "length"}}},
        {"finish_reasons": ["length"]},
        {"done_reason": "length"},
        {"stop_type": "limit"},
        {"stop_reason": "FinishReason.MAX_TOKENS"},
    ],
)
def test_reasons_of_servers_say_that_an_answer_was_cut(reason: dict[str, Any]) -> None:
    assert row(answer(**reason)).cut == row(answer(), **reason).cut == {1}


@pytest.mark.parametrize("part", [{"type": "image", "text": "", "image": "x"}, {"type": "thinking", "text": "t"}])
def test_parts_that_are_no_text_are_not_dropped_or_said(part: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="content that is not text"):
        row(answer(content=[part, {"type": "text", "text": "a"}]))


def test_calls_of_sharegpt_are_calls_and_those_in_a_row_one_answer() -> None:
    call = {"from": "function_call", "value": '{"name": "w", "arguments": {"c": 1}}'}
    found = row(call, call, {"from": "observation", "value": "5"}, answer(train=False), {**USER, "role": "User"})
    assert [m["role"] for m in found.messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert [c["function"]["name"] for c in found.messages[1]["tool_calls"]] == ["w", "w"]
    assert found.unlearned == {3}
    with pytest.raises(ValueError, match="message 2 is a tool call, and must be JSON"):
        row({"from": "function_call", "value": "w(1)"})


@pytest.mark.parametrize("column", [{"toolbox": [TOOL]}, {"apis": "[" + str(TOOL).replace("'", '"') + "]"}])
def test_schemas_under_another_name_and_histories_are_refused(column: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Call it 'tools'"):
        row(answer(), **column)
    with pytest.raises(ValueError, match="'chat_history' is not read"):
        row(answer(), chat_history=[["a", "b"]])


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_key_that_stands_twice_is_a_bad_record_and_the_next_is_read(tmp_path: Path, name: str) -> None:
    twice, whole = '{"text": "a", "text": "b"}', '{"text": "c", "text": "c"}'
    (tmp_path / name).write_text(f"[{twice},\n{whole}]" if name == "a.json" else f"{twice}\n{whole}\n")
    bad, good = read_records(tmp_path / name, "json" if name == "a.json" else "jsonl")
    assert isinstance(bad, BadRecord) and "the key 'text' twice" in bad.reason
    assert not isinstance(good, BadRecord) and good.value == {"text": "c"}


@pytest.mark.parametrize(
    ("content", "named"), [(b"PAR1xx", "Parquet"), (b"ARROW1", "Arrow"), ('{"text": "a"}'.encode("utf-16"), "UTF-16")]
)
def test_a_file_of_another_kind_is_one_error(tmp_path: Path, content: bytes, named: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content + b"\n" + content)
    with pytest.raises(ValueError, match=named):
        list(read_records(tmp_path / "a.jsonl", "jsonl"))
