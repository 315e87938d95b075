"""Spellings and files beside those that are known by name: refused by kind, never passed over."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from dflash_lightning.data.read.records import BadRecord, read_records
from dflash_lightning.data.read.rows import ChatRow, TokenRow, parse_record

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
FUNCTION = {"name": "w", "description": "weather"}


def row(**columns: Any) -> ChatRow:
    found = parse_record({"messages": [USER, ANSWER], **columns}, "f:1")
    assert isinstance(found, ChatRow)
    return found


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("custom_system_prompt", "Speak French."),
        ("bot_persona", ["A pirate."]),
        ("tool_descriptions", "w(city: str) tells the weather of a city"),
        ("few_shot_pairs", [{"role": "user", "content": "one two three four five"}]),
        ("dialog", [{"from": "human", "value": "before"}]),
    ],
)
def test_text_that_the_model_should_have_been_told_is_refused_under_any_name(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"f:1: '{key}' stands in no message"):
        row(**{key: value})
    assert row(system_fingerprint="fp_1", prompt_id="a 1", dialog=[USER, ANSWER]).messages == [USER, ANSWER]


@pytest.mark.parametrize("form", ["input_schema", "inputSchema"])
def test_schemas_of_other_forms_are_refused_under_any_name(form: str) -> None:
    schema = {**FUNCTION, form: {"type": "object"}}
    with pytest.raises(ValueError, match="Call it 'tools'"):
        row(abilities=[schema])
    with pytest.raises(ValueError, match=rf"'tools' holds a schema with '{form}'.*Write it as"):
        row(tools=[schema])
    with pytest.raises(ValueError, match="Call it 'tools'"):
        row(abilities=[{"type": "function", "function": FUNCTION}])
    row(calls=[{"type": "function", "function": {**FUNCTION, "arguments": {}}}])


@pytest.mark.parametrize("mark", [{"keep": False}, {"is_target": False}, {"discard": True}, {"context_only": True}])
def test_a_yes_or_no_that_leaves_an_answer_out_is_refused(mark: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="which may mark an answer as not to be learned"):
        row(messages=[USER, {**ANSWER, **mark}])
    other = {key: not value for key, value in mark.items()}
    assert row(messages=[USER, {**ANSWER, **other, "label": 0}]).unlearned == frozenset()


@pytest.mark.parametrize(
    "said",
    [{"truncated": True}, {"eot": False}, {"status": "incomplete"}, {"incomplete_details": {"reason": "max_tokens"}}],
)
def test_an_answer_that_is_said_to_be_unfinished_was_cut(said: dict[str, Any]) -> None:
    assert row(**said).cut == row(messages=[USER, {**ANSWER, **said}]).cut == {1}
    assert row(messages=[USER, {**ANSWER, "truncated": False, "eot": True, "status": "completed"}]).cut == frozenset()


IDS, MASK = [5, 6, 7, 8], [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"labels": [-100, -100, -100, 8]}, "'labels' and 'loss_mask' differ"),
        ({"position_ids": [0, 1, 0, 1]}, "several texts in one row"),
        ({"attention_mask": [1, 1, 2, 2]}, "several texts in one row"),
        ({"cu_seqlens": [0, 2, 4]}, "several texts in one row"),
        ({"document_ids": [0, 0, 1, 1]}, "several texts in one row"),
    ],
)
def test_tokens_that_are_packed_or_labelled_otherwise_are_refused(column: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"f:1: .*{message}"):
        parse_record({"input_ids": IDS, "loss_mask": MASK, **column}, "f:1")


def test_columns_that_say_what_the_mask_says_are_let_be() -> None:
    same = {"labels": [-100, -100, 7, 8], "position_ids": [0, 1, 2, 3], "attention_mask": [1] * 4, "seq_lens": [4]}
    assert isinstance(parse_record({"input_ids": IDS, "loss_mask": MASK, **same, "doc_ids": [3] * 4}, "f:1"), TokenRow)


@pytest.mark.parametrize(
    "half",
    [
        {"tools": [{"type": "function", "function": {**FUNCTION, "description": "\ud800"}}]},
        {"messages": [USER, {**ANSWER, "reasoning_content": "\udc00"}]},
        {"messages": [USER, {**ANSWER, "tool_calls": [{"function": {"name": "w", "arguments": {"\ud800": 1}}}]}]},
        {"chat_template_kwargs": {"x": "\ud800"}},
    ],
)
def test_half_a_character_is_found_wherever_the_template_may_write_it(half: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"f:1: .* holds half a character"):
        row(**half)


@pytest.mark.parametrize("behind", ['\n[{"text": "b"}]', " x", "\0\0"])
def test_what_follows_a_list_is_not_lost(tmp_path: Path, behind: str) -> None:
    (tmp_path / "a.json").write_text('[{"text": "a"}]' + behind)
    with pytest.raises(ValueError, match=r"a.json:\d: .*the list ends, and more follows"):
        list(read_records(tmp_path / "a.json", "json"))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"PK\x03\x04", "zip"),
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (b"<!DOCTYPE html>", "web page"),
        (b"\x1f\x8b", "packed"),
        (b"a.jsonl".ljust(257, b"\0") + b"ustar  ", "tar"),
        (b"\xff\xff\xff\xff", "Arrow stream"),
    ],
)
def test_a_file_of_another_kind_is_one_error(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(content + b'\n{"text": "a"}\n'))
    with pytest.raises(ValueError, match=f"a.jsonl.gz: is no JSON in UTF-8 but .*{named}"):
        list(read_records(path, "jsonl"))


def test_zstandard_that_is_cut_off_says_so_and_frames_follow_each_other(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    line = json.dumps({"text": "some words"}).encode() + b"\n"
    frame, path = zstandard.compress(line * 3), tmp_path / "a.jsonl.zst"
    for content, whole, cut in ((frame * 2, 6, False), (frame + frame[:-6], 3, True), (frame[:-6], 0, True)):
        path.write_bytes(content)
        found = list(read_records(path, "jsonl"))
        bad = [record for record in found if isinstance(record, BadRecord)]
        assert [record.cut for record in bad] == [True] * cut and len(found) - len(bad) >= whole


def test_a_table_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet: .*several columns are called 'text'"):
        list(read_records(tmp_path / "a.parquet", "parquet"))
