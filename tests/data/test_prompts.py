"""Prompts are what would be served: whole conversations with their tools, up to the last message that is no answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_lightning.data import ChatRenderer, ChatRow, Prompt, left_out_line, load_prompts, render_prompt
from dflash_lightning.data.read.rows import parse_record
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.regenerate.regenerate import regenerate
from dflash_lightning.target import FrozenTarget

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def said(text: str) -> list[dict[str, Any]]:
    """``s`` system, ``u`` user, ``a`` assistant, ``c`` a call, ``t`` what the tool said."""
    roles = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}
    calls = {"c": {"tool_calls": [CALL]}}
    return [{"role": roles[one], "content": f"{one}{i}", **calls.get(one, {})} for i, one in enumerate(text)]


def write(path: Path, *records: object) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return path


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ("u", "u"),
        ("ua", "u"),
        ("uau", "uau"),
        ("suaua", "suau"),
        ("au", "au"),
        ("uu", "uu"),
        ("uaa", "u"),
        ("uct", "uct"),
        ("ucta", "uct"),
        ("uc", "u"),
        ("ua" + "s", "u"),
    ],
)
@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_a_conversation_is_asked_up_to_its_last_message_that_is_no_answer(
    row: str, asked: str, key: str, tmp_path: Path
) -> None:
    (prompt,) = load_prompts(write(tmp_path / "p.jsonl", {key: said(row)}))
    assert prompt.messages == said(row)[: len(asked)] and prompt.left_out == len(row) - len(asked)
    assert prompt.where == f"{tmp_path / 'p.jsonl'}:1"


def test_what_the_rows_hold_and_is_not_asked_is_counted_in_one_line(tmp_path: Path) -> None:
    rows = [{"turns": ["a", "b", "c"]}, {"turns": ["a"]}, {"messages": said("uaua")}, {"messages": said("uctaa")}]
    prompts = load_prompts(write(tmp_path / "p.jsonl", *rows))
    assert [len(prompt.messages) for prompt in prompts] == [1, 1, 3, 3]
    assert left_out_line(prompts) == (
        "prompts: of 4 rows 1 is asked only the first of several turns, because no answers between them are recorded "
        "(2 messages left out); 2 are asked up to the last question, without the answer recorded behind it (3 messages "
        "left out)"
    )
    assert left_out_line(prompts[1:2]) is None and left_out_line([]) is None
    assert len(load_prompts(tmp_path / "p.jsonl", limit=1)) == 1


def test_prompts_keep_their_tools_system_text_and_template_settings(kit: Any, tmp_path: Path) -> None:
    """What the prompt holds before the answer is what a training row of the same record holds."""
    tokenizer = kit.make_tokenizer(TOOL_TEMPLATE)
    for record in (
        {"messages": said("uc"), "tools": [TOOL]},
        {"messages": said("uctc"), "functions": json.dumps([TOOL["function"]]), "system": "s"},
        {"prompt": "q", "response": "a", "tool_defs": [TOOL], "system_prompt": "s"},
    ):
        (prompt,) = load_prompts(write(tmp_path / "p.jsonl", record))
        ids = render_prompt(tokenizer, prompt)
        row = parse_record(record, "a")
        assert isinstance(row, ChatRow)
        (rendered,) = ChatRenderer(tokenizer).of_row(row)
        assert tokenizer.decode(ids) == rendered.turns[-1].prompt and "weather" in tokenizer.decode(ids)
    (prompt,) = load_prompts(write(tmp_path / "p.jsonl", {"turns": ["q"], "tools": json.dumps([TOOL])}))
    assert "weather" in tokenizer.decode(render_prompt(tokenizer, prompt))


def test_settings_of_a_prompt_stand_over_those_given(kit: Any, tmp_path: Path) -> None:
    tokenizer = kit.make_tokenizer("qwen3")
    path = write(tmp_path / "p.jsonl", {"turns": ["q"]}, {"turns": ["q"], "enable_thinking": False})
    plain, own = load_prompts(path)
    off = render_prompt(tokenizer, plain, enable_thinking=False)
    assert render_prompt(tokenizer, own) == render_prompt(tokenizer, own, enable_thinking=True) == off
    assert render_prompt(tokenizer, plain) != off
    assert render_prompt(tokenizer, [{"role": "user", "content": "q"}], enable_thinking=False) == off


def test_a_prompt_that_cannot_be_shown_is_refused_with_its_line(kit: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"turns": ["q"], "tools": [TOOL]}, {"turns": ["q"], "enable_thinking": False})
    tools, settings = load_prompts(path)
    for prompt, message in ((tools, "1: the chat template does not show the row's tools"), (settings, "2: .*never")):
        with pytest.raises(ValueError, match=rf"p.jsonl:{message}.*Change the prompt"):
            render_prompt(kit.make_tokenizer("chatml"), prompt)


def test_row_that_holds_no_prompt_is_refused_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"turns": ["a"]}, {"messages": said("sa")})
    with pytest.raises(ValueError, match=r"p.jsonl:2: no user turn"):
        load_prompts(path)
    with pytest.raises(ValueError, match=r"q.jsonl:1: a plain text is not a prompt. Prompts are 'turns'"):
        load_prompts(write(tmp_path / "q.jsonl", {"text": "Once"}))
    with pytest.raises(ValueError, match=r"q.jsonl:1: a tokenised row is not a prompt"):
        load_prompts(write(tmp_path / "q.jsonl", {"input_ids": [1], "loss_mask": [1]}))


def test_what_regenerate_wrote_is_read_as_prompts_and_asked_again(
    make_target: Callable[..., FrozenTarget], tmp_path: Path
) -> None:
    """Also with the settings and tools of its rows, which it hands on."""
    target = make_target("llama", seed=3)
    rows = [{"turns": ["one", "two"], "system": "s"}, {"messages": said("u")}]
    settings: dict[str, Any] = {"decoding": DecodingSettings(batch_size=2, max_new_tokens=6), "progress": False}
    out = regenerate(write(tmp_path / "p.jsonl", *rows), target, tmp_path / "o.jsonl", **settings).out
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert all("input_ids" in row for row in written)
    prompts = load_prompts(out)
    assert [prompt.messages for prompt in prompts] == [row["messages"][:-1] for row in written]
    assert prompts[0].messages[0] == {"role": "system", "content": "s"}
    for prompt, row in zip(prompts, written, strict=True):
        ids = render_prompt(target.tokenizer, prompt)
        assert row["input_ids"][: len(ids)] == ids and row["loss_mask"][len(ids)] == 1
    again = regenerate(out, target, tmp_path / "again.jsonl", **settings).out
    assert [json.loads(line)["messages"] for line in again.read_text().splitlines()] == [
        row["messages"] for row in written
    ]


def test_regenerate_asks_with_the_columns_beside_the_conversation_and_hands_them_on(
    make_target: Callable[..., FrozenTarget], kit: Any, tmp_path: Path
) -> None:
    target = make_target("llama", seed=3, vocab_size=len(kit.make_tokenizer("chatml")))
    template = TOOL_TEMPLATE.replace("{% if tools %}", "{{ mood | default('') }}{% if tools %}")
    target.tokenizer = kit.make_tokenizer(template)
    rows = [
        {"conversations": [{"from": "human", "value": "q"}], "tools": json.dumps([TOOL]), "system": "Be brief."},
        {"turns": ["q"], "chat_template_kwargs": {"mood": "sad"}},
        {"turns": ["q"], "history": [["a", "b"]]},
        {"turns": ["q"], "chat_template_kwargs": {"unknown": "x"}},
    ]
    settings: dict[str, Any] = {"decoding": DecodingSettings(batch_size=2, max_new_tokens=4), "progress": False}
    report = regenerate(write(tmp_path / "p.jsonl", *rows), target, tmp_path / "o.jsonl", **settings)
    first, second = (json.loads(line) for line in report.out.read_text().splitlines())
    texts = [target.tokenizer.decode(row["input_ids"]) for row in (first, second)]
    assert first["tools"] == [TOOL] and "weather" in texts[0]
    assert texts[0].index("weather") < texts[0].index("Be brief.") < texts[0].index("user\nq")
    assert second["chat_template_kwargs"] == {"mood": "sad"} and texts[1].startswith("sad<|im_start|>user")
    assert report.failures is not None
    reasons = [json.loads(line)["reason"] for line in report.failures.read_text().splitlines()]
    assert "'history' is not read" in reasons[0] and "['unknown'], which the chat template never reads" in reasons[1]
    assert [render_prompt(target.tokenizer, prompt) for prompt in load_prompts(report.out)] == [
        row["input_ids"][: row["loss_mask"].index(1)] for row in (first, second)
    ]


def test_a_message_list_is_a_prompt_without_a_place() -> None:
    messages = said("u")
    assert Prompt.of(messages) == Prompt(messages) and Prompt.of(Prompt(messages)) == Prompt(messages)
    assert "'content': 'u0'" in Prompt(messages).name and Prompt(messages, where="a:1").name == "a:1"


def test_a_disk_that_fails_is_named_with_the_file(tmp_path, monkeypatch):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["hi"]}\n')

    def fails(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("dflash_lightning.data.read.compression._Checked.readinto", fails)
    with pytest.raises(ValueError, match=r"prompts.jsonl: cannot be read \(\[Errno 5\] Input/output error\)"):
        load_prompts(file)
