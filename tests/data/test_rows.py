"""Every record is read for what it is, or refused with file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_lightning.data import ChatRow, PromptRow, TextRow, TokenRow, load_prompts, read_rows
from dflash_lightning.data.read.rows import parse_record


def write(path: Path, *records: object) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return path


MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": MESSAGES},
        {"conversations": MESSAGES},
        {"prompt": "Hi", "response": "Hello"},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, MESSAGES[1]]},
        {"instruction": "Hi", "output": "Hello"},
        {"instruction": "Hi", "input": "", "output": "Hello", "history": [], "system": ""},
        {"prompt": "Hi", "completion": "Hello"},
        {"messages": MESSAGES, "prompt": "Hi", "source": "x"},
        {"messages": [{**m, "from": m["role"], "value": m["content"], "weight": 1} for m in MESSAGES]},
        {"messages": [{**m, "name": None, "tool_calls": None} for m in MESSAGES], "text": None, "turns": None},
    ],
)
def test_chat_spellings_give_the_same_messages(tmp_path: Path, record: dict) -> None:
    (row,) = read_rows(write(tmp_path / "a.jsonl", record))
    assert isinstance(row, ChatRow) and row.messages == MESSAGES


def test_an_input_follows_the_instruction_and_a_system_text_comes_first(tmp_path: Path) -> None:
    record = {"instruction": "Sort.", "input": "3 1", "output": "1 3", "system": "Be brief."}
    (row,) = read_rows(write(tmp_path / "a.jsonl", record))
    assert isinstance(row, ChatRow) and [(m["role"], m["content"]) for m in row.messages] == [
        ("system", "Be brief."),
        ("user", "Sort.\n\n3 1"),
        ("assistant", "1 3"),
    ]


def test_prompts_and_plain_text_are_told_apart_from_chat(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "Hi"}, {"prompt": "Hi", "response": None}, {"text": "Once upon"})
    assert [(type(row), vars(row).get("turns"), vars(row).get("text")) for row in read_rows(path)] == [
        (PromptRow, ["Hi"], None),
        (PromptRow, ["Hi"], None),
        (TextRow, None, "Once upon"),
    ]


CHATS = {
    "messages": {"messages": MESSAGES},
    "conversations": {"conversations": MESSAGES},
    "alpaca": {"instruction": "Hi", "output": "Hello"},
    "response": {"prompt": "Hi", "response": "Hello"},
    "completion": {"prompt": "Hi", "completion": "Hello"},
    "turns": {"turns": ["Hi"]},
    "text": {"text": "Hi"},
}


@pytest.mark.parametrize("one", CHATS)
@pytest.mark.parametrize("other", CHATS)
def test_record_of_two_kinds_is_refused_until_the_kind_is_said(one: str, other: str) -> None:
    record = {**CHATS[one], **CHATS[other]}
    if one != other:
        with pytest.raises(ValueError, match=rf"a:1: could be read as .*'{one}'.*kind: "):
            parse_record(record, "a:1")
    said = parse_record(record, "a:1", one)  # type: ignore[arg-type]
    assert said == parse_record(CHATS[one], "a:1")


def test_tokens_are_used_verbatim_whatever_else_the_record_holds() -> None:
    """What ``regenerate`` writes: ids to train on, messages to read."""
    record = {"messages": MESSAGES, "input_ids": [1, 2], "loss_mask": [0, 1], "row": 3}
    assert parse_record(record, "a:1") == TokenRow("a:1", [1, 2], [0, 1])
    assert isinstance(parse_record(record, "a:1", "messages"), ChatRow)
    with pytest.raises(ValueError, match=r"'loss_mask' is missing.*need both"):
        parse_record({"messages": MESSAGES, "input_ids": [1, 2]}, "a:1")


def test_json_list_and_json_lines_hold_the_same_rows(tmp_path: Path) -> None:
    records = [{"turns": ["a", "b"]}, {"messages": MESSAGES}]
    (tmp_path / "a.json").write_text(json.dumps(records, indent=1))
    rows = [list(read_rows(path)) for path in (tmp_path / "a.json", write(tmp_path / "a.jsonl", *records))]
    assert [type(row) for row in rows[0]] == [type(row) for row in rows[1]] == [PromptRow, ChatRow]


def test_extra_keys_of_a_message_reach_the_template(tmp_path: Path) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "reasoning_content": "r"}
    (row,) = read_rows(write(tmp_path / "a.jsonl", {"messages": [MESSAGES[0], message], "tools": [{"name": "f"}]}))
    assert isinstance(row, ChatRow) and row.tools == [{"name": "f"}]
    assert row.messages[1] == {**message, "content": ""}


def test_tokenised_rows_are_read_verbatim(tmp_path: Path) -> None:
    (row,) = read_rows(write(tmp_path / "a.jsonl", {"input_ids": [5, 6, 7], "loss_mask": [0, 1, True]}))
    assert isinstance(row, TokenRow) and (row.input_ids, row.loss_mask) == ([5, 6, 7], [0, 1, 1])


def test_limit_stops_before_a_broken_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"turns": ["a"]}\n{broken')
    assert len(list(read_rows(path, limit=1))) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"turns": ["a"', "a.jsonl:3: not valid JSON.*correct or remove this line"),
        ("[1]", "a.jsonl:3: a record is a JSON object"),
        ('{"texts": "a"}', "a.jsonl:3: no known key.*'messages'"),
        ('{"input_ids": [1]}', "a.jsonl:3: 'loss_mask' is missing.*need both"),
        ('{"input_ids": [1, 2], "loss_mask": [1]}', "a.jsonl:3: 2 input_ids but 1 loss_mask"),
        ('{"input_ids": [1], "loss_mask": [2]}', r"a.jsonl:3: loss_mask holds \[2\].*Use 1"),
        ('{"input_ids": ["a"], "loss_mask": [1]}', "a.jsonl:3: 'input_ids' must be a list of whole numbers"),
        ('{"turns": []}', "a.jsonl:3: 'turns' must be a list of texts"),
        ('{"messages": "hi"}', "a.jsonl:3: 'messages' must be a list of messages"),
        ('{"messages": [{"content": "hi"}]}', "a.jsonl:3: message 1 needs 'role' and 'content'"),
        ('{"messages": [{"role": "robot", "content": "hi"}]}', "a.jsonl:3: message 1 has role 'robot'. Known roles"),
        ('{"messages": [{"role": "user"}]}', "a.jsonl:3: message 1 .user. has no 'content'"),
        ('{"messages": [{"role": "user", "content": [{"image": 1}]}]}', "a.jsonl:3: message 1 .*Only text"),
        ('{"messages": [{"role": ["user"], "content": "hi"}]}', r"a.jsonl:3: message 1 has role \['user'\]. Known"),
        ('{"messages": [{"role": "user", "from": "gpt", "content": "hi"}]}', "'role' and 'from', which differ"),
        ('{"messages": [{"role": "user", "value": "a", "content": "b"}]}', "'content' and 'value', which differ"),
        ('{"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}', "weight 0.5, which is not applied"),
        ('{"conversations": [{"from": "gpt", "tool_calls": [1]}]}', "a.jsonl:3: message 1 .gpt. has no 'content'"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "a.jsonl:3: 'message 1' holds half a character"),
        ('{"text": "a\\udc00"}', "a.jsonl:3: 'text' holds half a character .character 2"),
        ('{"text": 3}', "a.jsonl:3: 'text' must be text, not 3"),
        ('{"messages": [], "tools": "f"}', "a.jsonl:3: 'tools' must be a list"),
        ('{"instruction": "a", "output": 3}', "a.jsonl:3: 'output' must be text"),
        ('{"instruction": "a", "output": "b", "history": [["c", "d"]]}', "'history' is not read. Write .*'messages'"),
    ],
)
def test_bad_record_is_refused_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"turns": ["a"]}}\n\n{line}\n')
    with pytest.raises(ValueError, match=message):
        list(read_rows(path))


def test_cut_json_list_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[\n{"turns": ["a"]},\n{"turns": ["b')
    with pytest.raises(ValueError, match=r"a.json:3: not valid JSON.*was the file cut off"):
        list(read_rows(path))
    assert len(list(read_rows(path, limit=1))) == 1


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.train: .*nowhere.jsonl is not a file.*Check the path"):
        list(read_rows(tmp_path / "nowhere.jsonl", setting="data.train"))


def test_file_inside_a_package_is_found_and_a_wrong_one_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"package 'dflash_lightning' has no file 'data/nothing.jsonl'.*path inside it"
    ):
        list(read_rows("package://dflash_lightning/data/nothing.jsonl"))
    with pytest.raises(ValueError, match=r"package 'no_such_package' is not installed"):
        list(read_rows("package://no_such_package/a.jsonl"))
    with pytest.raises(ValueError, match=r"py.typed.*holds no rows"):
        load_prompts("package://dflash_lightning/py.typed")
