"""What stands beside a conversation is used, or refused by name; nothing that the model should see is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_lightning.data import ChatRenderer, ChatRow, DocumentMaker, PromptRow, Source, UnusableRow
from dflash_lightning.data.read.rows import parse_record

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}
MESSAGES = [USER, ANSWER]
CHATS: dict[str, dict[str, Any]] = {
    "messages": {"messages": MESSAGES},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    "response": {"prompt": "Hi", "response": "Hello"},
    "completion": {"prompt": "Hi", "completion": "Hello"},
    "alpaca": {"instruction": "Hi", "output": "Hello"},
}
PROMPTS: dict[str, dict[str, Any]] = {"turns": {"turns": ["Hi"]}, "prompt": {"prompt": "Hi"}}
ALL = {**CHATS, **PROMPTS}
FUNCTION = {"name": "weather", "description": "Of a city", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}


def messages_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    row = parse_record(record, "a:1")
    assert isinstance(row, ChatRow | PromptRow)
    return row.messages


# -- the system text --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    "key", ["system", "system_prompt", "system_message", "systemPrompt", "System-Message", "system_instruction"]
)
def test_a_system_text_beside_the_conversation_opens_it(kind: str, key: str) -> None:
    assert messages_of({**ALL[kind], key: "Be brief."})[:2] == [SYSTEM, USER]


def test_a_system_text_may_be_parts_or_said_twice_and_says_nothing_when_it_is_empty() -> None:
    assert messages_of({"messages": MESSAGES, "system": [{"type": "text", "text": "Be brief."}]})[0] == SYSTEM
    assert messages_of({"messages": [SYSTEM, *MESSAGES], "system_prompt": "Be brief."}) == [SYSTEM, *MESSAGES]
    assert messages_of({"messages": MESSAGES, "system": "Be brief.", "system_prompt": "Be brief."})[0] == SYSTEM
    longer = {"role": "system", "content": "Reason in French.\n\nBe brief."}
    for opening in (longer, {**longer, "role": "developer"}):
        for key in ("system", "developer"):
            assert messages_of({"messages": [opening, *MESSAGES], key: "Be brief."}) == [opening, *MESSAGES]
    for empty in ("", None, []):
        assert messages_of({"messages": MESSAGES, "system": empty}) == MESSAGES


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [SYSTEM, *MESSAGES], "system": "Be long."}, "the column says 'Be long.', and .* 'Be brief.'"),
        ({"messages": [*MESSAGES, SYSTEM, *MESSAGES], "system": "Be brief."}, "own system turn 'Be brief.'"),
        ({"messages": [{"role": "developer", "content": "d"}, *MESSAGES], "system": "s"}, "own system turn 'd'"),
        ({"messages": MESSAGES, "system": "a", "system_prompt": "b"}, "'system' and 'system_prompt' differ. Remove"),
        ({"messages": MESSAGES, "system": 3}, "system has content that is not text: 3"),
    ],
)
def test_system_texts_that_differ_are_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"a:1: .*{message}"):
        parse_record(record, "a:1")


def test_marks_stay_with_their_answers_behind_a_system_text() -> None:
    marked = [USER, {**ANSWER, "train": False}, USER, {**ANSWER, "finish_reason": "length"}]
    row = parse_record({"messages": marked, "system": "Be brief."}, "a:1")
    assert isinstance(row, ChatRow) and (row.unlearned, row.cut) == ({2}, {4})


# -- tools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tools", [TOOL]),
        ("tools", json.dumps([TOOL])),
        ("tools", [json.dumps(TOOL)]),
        ("tools", TOOL),
        ("tool_defs", [TOOL]),
        ("toolDefinitions", json.dumps([TOOL])),
        ("functions", [FUNCTION]),  # OpenAI's first form
        ("functions", json.dumps([FUNCTION])),
        ("functions", [TOOL]),
    ],
)
def test_tools_are_read_in_every_spelling(kind: str, key: str, value: Any) -> None:
    row = parse_record({**ALL[kind], key: value}, "a:1")
    assert isinstance(row, ChatRow | PromptRow) and row.tools == [TOOL]


@pytest.mark.parametrize("empty", [None, [], "", "[]", "null"])
def test_an_empty_column_of_tools_hides_no_other(empty: Any) -> None:
    row = parse_record({"messages": MESSAGES, "tools": empty, "tool_defs": [TOOL]}, "a:1")
    assert isinstance(row, ChatRow) and row.tools == [TOOL]
    row = parse_record({"messages": MESSAGES, "tools": empty}, "a:1")
    assert isinstance(row, ChatRow) and row.tools is None


@pytest.mark.parametrize("value", ["search and calc", ["search"], '[{"a"', 3, [3], {"a": {}}])
def test_tools_that_are_no_schemas_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"a:1: 'tool_defs' must be a list of function schemas \(or JSON text"):
        parse_record({"messages": MESSAGES, "tool_defs": value}, "a:1")


def test_tools_that_differ_are_refused() -> None:
    other = {"type": "function", "function": {**FUNCTION, "name": "time"}}
    with pytest.raises(ValueError, match="'tools' and 'functions' differ"):
        parse_record({"messages": MESSAGES, "tools": [TOOL], "functions": [other]}, "a:1")
    row = parse_record({"messages": MESSAGES, "tools": [TOOL], "functions": json.dumps([FUNCTION])}, "a:1")
    assert isinstance(row, ChatRow) and row.tools == [TOOL]


def test_an_old_function_call_is_a_tool_call() -> None:
    call = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    expected = [{"type": "function", "function": call}]
    for said in ({"function_call": call}, {"function_call": json.dumps(call)}, {"tool_calls": json.dumps(expected)}):
        (_, message) = messages_of({"messages": [USER, {"role": "assistant", "content": None, **said}]})
        assert message == {"role": "assistant", "content": "", "tool_calls": expected}
    for wrong in ({"tool_calls": "weather"}, {"tool_calls": [1]}, {"function_call": call, "tool_calls": expected}):
        with pytest.raises(ValueError, match=r"a:1: message 2.*(must be a list of calls|beside 'tool_calls')"):
            messages_of({"messages": [USER, {**ANSWER, **wrong}]})


def test_tools_of_a_message_that_the_template_does_not_show_make_the_row_unusable(kit: Any) -> None:
    renderer = ChatRenderer(kit.make_tokenizer("chatml"))
    for said in ([TOOL], json.dumps([TOOL])):
        with pytest.raises(UnusableRow, match="does not show the row's tools"):
            renderer.rendered([{**SYSTEM, "tools": said}, *MESSAGES])


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("history", [["a", "b"]], "'history' is not read. Write the whole conversation as 'messages'"),
        ("context", "Oslo is cold.", "'context' stands in no message"),
        ("Context", ["Oslo is cold."], "'Context' stands in no message"),
        ("documents", [{"title": "Oslo", "text": "cold"}], "'documents' stands in no message"),
        ("prefill", "Well,", "'prefill' stands in no message"),
        ("imageUrl", "a.png", "'imageUrl' cannot be shown"),
        ("query", "How cold?", "'query' stands in no message"),
        ("images", ["a.png"], "'images' cannot be shown to a text model"),
        ("audio", {"path": "a.wav"}, "'audio' cannot be shown"),
        ("developer", "Be kind.", "'developer' stands in no message"),
        ("chat_template", "{{ x }}", "'chat_template' is not read"),
        ("tool_choice", "none", "'tool_choice' is 'none', which changes what is served"),
        ("thinking", True, "'thinking' is True, no text. A switch belongs into chat_template_kwargs"),
        ("reasoning", "off", "'reasoning' is 'off', no text"),
        ("assistant_masks", [0, 1], "'assistant_masks' has no input_ids to belong to"),
    ],
)
def test_what_would_be_lost_is_refused_by_name_with_a_way_out(kind: str, key: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"a:1: {message}.*ignore: \[{key}\]"):
        parse_record({**ALL[kind], key: value}, "a:1")
    assert parse_record({**ALL[kind], key: value}, "a:1", ignore=[key]) == parse_record(ALL[kind], "a:1")
    for empty in (None, "", []):
        assert parse_record({**ALL[kind], key: empty}, "a:1") == parse_record(ALL[kind], "a:1")


@pytest.mark.parametrize("key", ["instruction", "prompt", "input", "context"])
def test_a_text_that_a_message_repeats_is_no_loss(key: str) -> None:
    assert messages_of({"messages": MESSAGES, key: "Hi"}) == MESSAGES
    assert messages_of({"messages": [{**USER, "content": "Given this: Hi"}, ANSWER], key: "Hi"})[1] == ANSWER
    with pytest.raises(ValueError, match=rf"'{key}' stands in no message, so the model would not see it"):
        messages_of({"messages": MESSAGES, key: "Speak French."})


def test_other_columns_are_notes() -> None:
    notes = {"id": 3, "source": "x", "score": 0.5, "category": ["a"], "metadata": {"system": "s", "tools": [TOOL]}}
    notes |= {"answer": "42", "question": "Say hello", "reference": "Hello", "usage": {"total_tokens": 3}}
    for chat in ALL.values():
        assert parse_record({**chat, **notes}, "a:1") == parse_record(chat, "a:1")


def test_a_source_may_leave_out_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES, "context": "Oslo", "history": [["a", "b"]]}) + "\n")
    assert not list(Source(str(path)).good_rows())
    (row,) = Source(str(path), ignore=("context", "history")).good_rows()
    assert isinstance(row, ChatRow) and row.messages == MESSAGES
    assert Source(str(path), ignore=("context",)).settings()["ignore"] == ["context"], "it belongs to the cache's key"


# -- reasoning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CHATS)
@pytest.mark.parametrize("key", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_beside_one_answer_is_its_own(kind: str, key: str, kit: Any) -> None:
    row = parse_record({**CHATS[kind], key: "greet"}, "a:1")
    assert isinstance(row, ChatRow)
    assert row.messages == [USER, {**ANSWER, "reasoning_content": "greet"}]
    ((_, spans),) = kit.texts(ChatRenderer(kit.make_tokenizer("always_thinks")), row.messages)
    assert spans == ["greet\n</think>\n\nHello<|im_end|>"]


def test_reasoning_that_the_answer_has_already_is_not_added() -> None:
    for answer in ({**ANSWER, "thinking": "greet"}, {**ANSWER, "content": "<think>\ngreet\n</think>\n\nHello"}):
        assert messages_of({"messages": [USER, answer], "reasoning": "greet"}) == [USER, answer]
    for answer in ({**ANSWER, "thinking": "other"}, {**ANSWER, "content": "<think>\nother\n</think>\n\nHello"}):
        with pytest.raises(ValueError, match=r"differs from the answer's own. Write it into the message"):
            messages_of({"messages": [USER, answer], "reasoning": "greet"})
    with pytest.raises(ValueError, match="is of no single answer"):
        messages_of({"messages": [*MESSAGES, *MESSAGES], "reasoning": "greet"})
    assert messages_of({"turns": ["Hi"], "reasoning": "greet"}) == [USER], "a prompt is asked without its answer"


def test_reasoning_of_a_sharegpt_message_is_kept() -> None:
    said = [{"from": "human", "value": "Hi", "id": 3}, {"from": "gpt", "value": "Hello", "reasoning": "greet"}]
    assert messages_of({"conversations": said}) == [USER, {**ANSWER, "reasoning": "greet"}]


# -- settings of the template -----------------------------------------------------------------------------------------


def prompt_text(kit: Any, record: dict[str, Any], **settings: Any) -> str:
    """What stands before the answer, in Qwen3's template."""
    row = parse_record(record, "a:1")
    assert isinstance(row, ChatRow)
    renderer = ChatRenderer(kit.make_tokenizer("qwen3"), **settings)
    (rendered,) = renderer.of_row(row)
    return str(rendered.turns[0].prompt)


def test_a_rows_own_template_settings_are_used_and_stand_over_those_of_the_run(kit: Any) -> None:
    off = "<think>\n\n</think>\n\n"
    row = {"messages": MESSAGES}
    assert not prompt_text(kit, row).endswith(off)
    for said in (
        {"chat_template_kwargs": {"enable_thinking": False, "other": None}},
        {"chat_template_kwargs": '{"enable_thinking": false}'},
        {"chatTemplateKwargs": {"enable_thinking": False}},
        {"enable_thinking": False},
    ):
        assert prompt_text(kit, {**row, **said}).endswith(off)
        assert prompt_text(kit, {**row, **said}, chat_template_kwargs={"enable_thinking": True}).endswith(off)
    assert prompt_text(kit, {**row, "chat_template_kwargs": {"xml_tools": []}}) == prompt_text(kit, row)


def test_a_rows_setting_that_the_template_never_reads_is_refused(kit: Any, tmp_path: Path) -> None:
    for settings, message in (
        ({"enable_thinkin": False}, r"hold \['enable_thinkin'\], which the chat template never reads"),
        ({"tools": [TOOL]}, r"hold \['tools'\], which are no settings of a template"),
    ):
        with pytest.raises(UnusableRow, match=message):
            prompt_text(kit, {"messages": MESSAGES, "chat_template_kwargs": settings})
    with pytest.raises(ValueError, match="'chat_template_kwargs' must be an object"):
        parse_record({"messages": MESSAGES, "chat_template_kwargs": "off"}, "a:1")
    with pytest.raises(ValueError, match="another column differ in 'enable_thinking'"):
        parse_record({"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": 1}, "enable_thinking": 0}, "a")
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES, "enable_thinking": False}) + "\n")
    maker = DocumentMaker(lambda: ChatRenderer(kit.make_tokenizer("chatml")), max_length=64, vocab_size=300)
    (outcome,) = maker.outcomes(str(path))
    assert outcome.dropped is not None and "never reads" in outcome.dropped and maker.summary.num_dropped == 1


# -- tokenised rows ---------------------------------------------------------------------------------------------------


def test_masks_beside_ids_must_agree_and_padding_is_refused() -> None:
    ids = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
    assert parse_record({**ids, "attention_mask": [1, 1, 1], "assistant_masks": [0, 1, 1]}, "a") is not None
    with pytest.raises(ValueError, match=r"attention_mask leaves out tokens.*Remove the padding"):
        parse_record({**ids, "attention_mask": [0, 1, 1]}, "a")
    with pytest.raises(ValueError, match="'assistant_masks' and 'loss_mask' differ"):
        parse_record({**ids, "assistant_masks": [1, 1, 1]}, "a")
    with pytest.raises(ValueError, match=r"'loss_mask' has no input_ids.*\"train\": false"):
        parse_record({"messages": MESSAGES, "loss_mask": [0, 1]}, "a")
