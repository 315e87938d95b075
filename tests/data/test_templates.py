"""Stock templates with their own tokenizers: what each family's target is taught, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from dflash_lightning.data import ChatRenderer, DraftData, UnusableRow, render_prompt
from dflash_lightning.data.read.rendering import NO_PROMPT, NO_TOOLS, NOT_EXTENDED, NOT_SHOWN
from dflash_lightning.target import FrozenTarget

Stock = Callable[[str], PreTrainedTokenizerBase]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_temperature",
            "description": "Of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def called(arguments: Any, **rest: Any) -> dict[str, Any]:
    """An assistant turn that calls the tool; nine characters of id are what Mistral's template asks for."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "get_temperature", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **rest}


RESULT = {"role": "tool", "content": "18", "tool_call_id": "abcdefghi", "name": "get_temperature"}


# -- Qwen3: thinking on and off ---------------------------------------------------------------------------------------


def test_qwen3_thinking_stripped_from_history_gives_one_row_per_turn(kit: Any, stock: Stock) -> None:
    messages = kit.chat("2+2?", "<think>\nadd\n</think>\n\n4", "3+3?", "<think>\nsum\n</think>\n\n6")
    first, second = kit.texts(ChatRenderer(stock("qwen3")), messages)
    assert first == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n",
        ["<think>\nadd\n</think>\n\n4<|im_end|>"],
    )
    assert second == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\n3+3?<|im_end|>\n<|im_start|>assistant\n",
        ["<think>\nsum\n</think>\n\n6<|im_end|>"],
    )
    assert kit.texts(ChatRenderer(stock("qwen3"), supervise="last_turn"), messages) == [second]


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
def test_qwen3_reasoning_in_a_field_of_its_own_gives_the_same_rows(kit: Any, stock: Stock, field: str) -> None:
    inline = kit.chat("2+2?", "<think>\nadd\n</think>\n\n4", "3+3?", "<think>\nsum\n</think>\n\n6")
    apart = kit.chat("2+2?", "4", "3+3?", "6")
    apart[1][field], apart[3][field] = "add", "sum"
    renderer = ChatRenderer(stock("qwen3"))
    assert kit.rows(renderer, apart) == kit.rows(renderer, inline)


def test_qwen3_without_thinking_has_the_empty_think_block_in_the_prompt(kit: Any, stock: Stock) -> None:
    renderer = ChatRenderer(stock("qwen3"), chat_template_kwargs={"enable_thinking": False})
    assert kit.texts(renderer, kit.chat("Hi", "Hello.")) == [
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", ["Hello.<|im_end|>"])
    ]
    assert not renderer.turns(kit.chat("Hi", "Hello."))[0].has_empty_reasoning


@pytest.mark.parametrize("kwargs", [None, {"enable_thinking": True}])
def test_qwen3_response_without_reasoning_is_noticed_while_thinking_is_on(
    kit: Any, stock: Stock, kwargs: dict[str, Any] | None
) -> None:
    renderer = ChatRenderer(stock("qwen3"), chat_template_kwargs=kwargs)
    turns = renderer.turns(kit.chat("Hi", "Hello.", "Bye", "<think>\na\n</think>\n\nb"))
    assert [turn.has_empty_reasoning for turn in turns] == [True, False]


def test_empty_think_block_that_the_generation_prompt_opened_is_noticed(kit: Any) -> None:
    """Here the target would close the block that the prompt opens, without a word in it."""
    renderer = ChatRenderer(kit.make_tokenizer("always_thinks"))
    messages = kit.chat("Hi", "Hello.", "Bye", "Ciao")
    messages[3]["reasoning_content"] = "part"
    assert [turn.has_empty_reasoning for turn in renderer.turns(messages)] == [True, False]
    assert renderer.turns(messages)[1].supervised == "part\n</think>\n\nCiao<|im_end|>"


def test_responses_without_reasoning_are_warned_of_and_refused_where_data_are_strict(
    kit: Any, make_tiny_model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = kit.make_tokenizer("qwen3")
    target = FrozenTarget(make_tiny_model("llama", vocab_size=len(tokenizer)), tokenizer, name="tiny")
    chats = [kit.chat("Hi", "Hello."), kit.chat("Bye", "Ciao."), kit.chat("2+2?", "<think>\nadd\n</think>\n\n4")]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    DraftData(target, train=str(file), max_length=128).setup()
    assert "2 responses without reasoning, while the template's thinking is on" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"2 responses without reasoning.*enable_thinking=false.*data.strict=true"):
        DraftData(target, train=str(file), max_length=128, strict=True).setup()
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats[:2]))
    off = DraftData(target, train=str(file), max_length=128, chat_template_kwargs={"enable_thinking": False})
    off.setup()
    assert off.summary.kept == 2 and not any("without reasoning" in text for text in off.summary.warnings())


def test_qwen3_reasoning_is_refused_while_thinking_is_off(kit: Any, stock: Stock) -> None:
    renderer = ChatRenderer(stock("qwen3"), chat_template_kwargs={"enable_thinking": False})
    for message in ({"content": "<think>\nadd\n</think>\n\n4"}, {"content": "4", "reasoning_content": "add"}):
        with pytest.raises(UnusableRow, match=NOT_EXTENDED):
            renderer.rendered([{"role": "user", "content": "2+2?"}, {"role": "assistant", **message}])


def test_qwen3_tool_turn_written_as_text_fans_out(kit: Any, stock: Stock) -> None:
    call = "<tool_call>\n{}\n</tool_call>"
    messages = [
        {"role": "user", "content": "Temp?"},
        {"role": "assistant", "content": call},
        {"role": "tool", "content": "18"},
        {"role": "assistant", "content": "It is 18."},
    ]
    renderer = ChatRenderer(stock("qwen3"), chat_template_kwargs={"enable_thinking": False})
    rows = kit.texts(renderer, messages)
    assert [spans for _, spans in rows] == [[f"{call}<|im_end|>"], ["It is 18.<|im_end|>"]]
    assert rows[0][0].endswith("<think>\n\n</think>\n\n")
    assert f"assistant\n{call}<|im_end|>\n<|im_start|>user\n<tool_response>\n18\n" in rows[1][0]


# -- tools ------------------------------------------------------------------------------------------------------------

CALLS = {
    "qwen3": '<tool_call>\n{"name": "get_temperature", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>',
    "gptoss": ' to=functions.get_temperature<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>',
}
ANSWERS = {
    "qwen3": "It is 18.<|im_end|>",
    "gptoss": "<|channel|>final<|message|>It is 18.<|return|>",
}


@pytest.mark.parametrize("arguments", [{"city": "Rome"}, '{"city": "Rome"}'], ids=["object", "text"])
@pytest.mark.parametrize("name", CALLS)
def test_tool_call_and_answer_are_supervised_and_the_tools_result_is_not(
    kit: Any, stock: Stock, name: str, arguments: Any
) -> None:
    kwargs = {"enable_thinking": False} if name == "qwen3" else None
    renderer = ChatRenderer(stock(name), chat_template_kwargs=kwargs)
    messages = [{"role": "user", "content": "Temp?"}, called(arguments), RESULT]
    messages.append({"role": "assistant", "content": "It is 18."})
    rows = kit.texts(renderer, messages, TOOLS)
    spans = [span for _, row in rows for span in row]
    assert spans == [CALLS[name], ANSWERS[name]]
    assert "get_temperature" in rows[0][0]  # the tools are in the prompt


def test_qwen3_keeps_reasoning_between_tool_turns_in_one_row(kit: Any, stock: Stock) -> None:
    """After the last question nothing is stripped, so the whole chain of calls is one row."""
    messages = [
        {"role": "user", "content": "Temp?"},
        called({"city": "Rome"}, reasoning_content="ask"),
        RESULT,
        {"role": "assistant", "content": "18.", "reasoning_content": "easy"},
    ]
    ((_, spans),) = kit.texts(ChatRenderer(stock("qwen3")), messages, TOOLS)
    assert spans[0].startswith("<think>\nask\n</think>\n\n<tool_call>") and spans[0].endswith("</tool_call><|im_end|>")
    assert spans[1] == "<think>\neasy\n</think>\n\n18.<|im_end|>"


@pytest.mark.parametrize("name", ["llama3_1", "gemma3", "smollm2"])
def test_tools_that_the_template_does_not_show_make_the_row_unusable(kit: Any, stock: Stock, name: str) -> None:
    renderer = ChatRenderer(stock(name))
    with pytest.raises(UnusableRow, match=NO_TOOLS):
        renderer.rendered(kit.chat("Temp?", "It is 18."), TOOLS)
    assert renderer.rendered(kit.chat("Temp?", "It is 18."), [])  # an empty list of tools is none


@pytest.mark.parametrize(
    ("name", "turn"),
    [
        ("llama3_1", called({"city": "Rome"})),  # knows no calls
        ("deepseek_v3", called('{"city": "Rome"}')),  # shows calls only where content is null
        ("gemma3", {"role": "assistant", "content": "4", "thinking": "add"}),
        ("never_shows_reasoning", {"role": "assistant", "content": "<think>\nadd\n</think>\n\n4"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_turn_that_the_template_shows_in_part_is_unusable(kit: Any, name: str, turn: dict[str, Any]) -> None:
    """Supervising what is left would teach the target to answer without its call or its reasoning."""
    tokenizer = kit.tokenizer(name if name in kit.templates else f"stock/{name}")
    with pytest.raises(UnusableRow, match=NOT_SHOWN.split("(")[0]):
        ChatRenderer(tokenizer).rendered([{"role": "user", "content": "2+2?"}, turn])


# -- the other families -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma3", "deepseek_v3", "smollm2", "gptoss"])
def test_chat_of_two_turns_with_the_stock_tokenizer(kit: Any, stock: Stock, name: str) -> None:
    tokenizer = stock(name)
    kwargs = {"enable_thinking": False} if name == "qwen3" else {}
    renderer = ChatRenderer(tokenizer, chat_template_kwargs=kwargs)
    system = "Be brief."
    messages = kit.chat("Hi", "Hello.", "Bye", "Ciao \u00fcber\U0001f600", system=system)
    stop = kit.stops[f"stock/{name}"]
    header = "<|channel|>final<|message|>" if name == "gptoss" else ""
    rows = kit.texts(renderer, messages)
    spans = [span for _, row in rows for span in row]
    assert spans == [f"{header}Hello.{stop}", f"{header}Ciao \u00fcber\U0001f600{stop}"]
    assert len(rows) == (2 if name in ("qwen3", "gptoss") else 1)
    ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    prompts = [render_prompt(tokenizer, messages[:i], **kwargs) for i in ends]
    found = kit.rows(renderer, messages)
    starts = [(row.input_ids, begin) for row in found for begin, _ in kit.spans(row.loss_mask)]
    assert [ids[:begin] for ids, begin in starts] == prompts
    assert "Be brief." in rows[0][0]


def test_phi_closes_a_conversation_with_the_eos_and_still_makes_one_row(kit: Any) -> None:
    """What stands after a turn's end is nobody's, so it does not matter that the next prompt lacks it."""
    rows = kit.texts(ChatRenderer(kit.make_tokenizer("phi3")), kit.chat("Hi", "Hello.", "Bye", "Ciao"))
    assert rows == [("<|user|>\nHi<|end|>\n<|assistant|>\n", ["Hello.<|end|>", "Ciao<|end|>"])]


def test_mistrals_space_before_the_response_is_generated_by_the_target(kit: Any) -> None:
    rows = kit.texts(ChatRenderer(kit.make_tokenizer("mistral")), kit.chat("Hi", "Hello.", "Bye", "Ciao"))
    assert rows == [("<bos>[INST] Hi [/INST]", [" Hello.</s>", " Ciao</s>"])]


def test_harmony_supervises_analysis_and_answer_and_drops_old_analysis(kit: Any, stock: Stock) -> None:
    messages = kit.chat("2+2?", "4", "3+3?", "6")
    messages[1]["thinking"], messages[3]["reasoning_content"] = "add", "sum"
    first, second = kit.texts(ChatRenderer(stock("gptoss")), messages)
    analysis = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}<|return|>"
    assert first[1] == [analysis.format("add", "4")] and second[1] == [analysis.format("sum", "6")]
    assert "add" not in second[0] and "final<|message|>4<|end|>" in second[0]


def test_gemma_refuses_roles_that_do_not_alternate_by_its_own_words(kit: Any, stock: Stock) -> None:
    with pytest.raises(UnusableRow, match="roles must alternate"):
        ChatRenderer(stock("gemma3")).rendered([*kit.chat("Hi"), *kit.chat("Hi", "Hello.")])


# -- conversations that begin in the middle ---------------------------------------------------------------------------


def test_assistant_turn_that_opens_a_conversation_is_history_only(kit: Any, smollm2: PreTrainedTokenizerBase) -> None:
    """ShareGPT was split into pieces: a third of them begin with a response whose prompt is lost."""
    messages = kit.chat("ignored", "Welcome.", "Hi", "Hello.")[1:]
    ((before, spans),) = kit.texts(ChatRenderer(smollm2), messages)
    assert spans == ["Hello.<|im_end|>"] and "Welcome." in before
    with pytest.raises(UnusableRow, match=NO_PROMPT):
        ChatRenderer(smollm2).rendered(messages[:1])
    with pytest.raises(UnusableRow, match="no message to respond to"):
        ChatRenderer(smollm2).encode_prompt([])


# -- template settings ------------------------------------------------------------------------------------------------


def test_setting_that_only_resembles_one_the_template_reads_is_refused(stock: Stock) -> None:
    """``thinking`` is what other models call it; as text it is even part of Qwen3's ``enable_thinking``."""
    with pytest.raises(ValueError, match=r"\['thinking'\] is never read.*what it reads: \['enable_thinking'\]"):
        ChatRenderer(stock("qwen3"), chat_template_kwargs={"thinking": False})


def test_setting_that_belongs_to_single_rows_is_refused(stock: Stock) -> None:
    with pytest.raises(ValueError, match=r"\['tools'\] is set row by row"):
        ChatRenderer(stock("qwen3"), chat_template_kwargs={"tools": TOOLS})


def test_settings_reach_the_prompt_and_the_row_alike(kit: Any) -> None:
    tokenizer = kit.make_tokenizer("harmony")
    renderer = ChatRenderer(tokenizer, chat_template_kwargs={"reasoning_effort": "high"})
    ((before, _),) = kit.texts(renderer, kit.chat("Hi", "Hello."))
    prompt = tokenizer.decode(render_prompt(tokenizer, kit.chat("Hi"), reasoning_effort="high"))
    assert before == prompt and "Reasoning: high" in prompt


def test_invalid_template_is_named_with_its_line(kit: Any) -> None:
    with pytest.raises(ValueError, match=r"is not valid .*line 2.*Correct tokenizer.chat_template"):
        ChatRenderer(kit.make_tokenizer("{{ x }}\n{% if %}"), chat_template_kwargs={"x": 1})


def test_arguments_that_are_no_json_object_stay_as_they_are(kit: Any, stock: Stock) -> None:
    renderer = ChatRenderer(stock("qwen3"), chat_template_kwargs={"enable_thinking": False})
    (turn,) = renderer.turns([{"role": "user", "content": "Temp?"}, called("Rome")])
    assert '"arguments": Rome}' in turn.supervised
