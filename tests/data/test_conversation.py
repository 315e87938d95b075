"""Masks come from render boundaries of the tokenizer's own template."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from dflash_lightning.data import ChatRenderer, UnusableRow, render_prompt


def test_append_only_conversation_becomes_one_row_with_one_span_per_turn(kit: Any) -> None:
    rows = kit.texts(ChatRenderer(kit.make_tokenizer("chatml")), kit.chat("Hi", "Hello.", "Bye", "See you."))
    assert rows == [
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", ["Hello.<|im_end|>", "See you.<|im_end|>"])
    ]


def test_last_turn_supervises_only_the_last_response(kit: Any) -> None:
    rows = kit.texts(
        ChatRenderer(kit.make_tokenizer("chatml"), supervise="last_turn"), kit.chat("Hi", "Hello.", "Bye", "See you.")
    )
    assert [spans for _, spans in rows] == [["See you.<|im_end|>"]]


def test_turns_after_the_last_response_are_left_out(kit: Any) -> None:
    (row,) = ChatRenderer(kit.make_tokenizer("chatml")).rendered(kit.chat("Hi", "Hello.", "and then?"))
    assert row.text.endswith("Hello.<|im_end|>\n")


def test_thinking_stripped_from_history_gives_one_row_per_turn(kit: Any) -> None:
    """Thinking is stripped from history: one row per assistant turn."""
    messages = kit.chat("2+2?", "<think>\nadd\n</think>\n\n4", "3+3?", "<think>\nsum\n</think>\n\n6")
    rows = kit.texts(ChatRenderer(kit.make_tokenizer("qwen3")), messages)
    assert [spans for _, spans in rows] == [
        ["<think>\nadd\n</think>\n\n4<|im_end|>"],
        ["<think>\nsum\n</think>\n\n6<|im_end|>"],
    ]
    assert rows[0][0] == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert "assistant\n4<|im_end|>" in rows[1][0] and rows[1][0].endswith("3+3?<|im_end|>\n<|im_start|>assistant\n")


def test_empty_think_block_of_the_generation_prompt_is_not_supervised(kit: Any) -> None:
    """Without thinking, the empty think block belongs to the prompt."""
    renderer = ChatRenderer(kit.make_tokenizer("qwen3"), chat_template_kwargs={"enable_thinking": False})
    ((prompt, spans),) = kit.texts(renderer, kit.chat("Hi", "Hello."))
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert spans == ["Hello.<|im_end|>"]
    assert not any(turn.has_empty_reasoning for turn in renderer.turns(kit.chat("Hi", "Hello.")))


def test_response_without_reasoning_while_thinking_is_on_is_noticed(kit: Any) -> None:
    """Thinking on: the empty block would be supervised although the target would not write it."""
    renderer = ChatRenderer(kit.make_tokenizer("qwen3"))
    assert [turn.has_empty_reasoning for turn in renderer.turns(kit.chat("Hi", "Hello."))] == [True]
    assert [turn.has_empty_reasoning for turn in renderer.turns(kit.chat("Hi", "<think>\na\n</think>\n\nb"))] == [False]


def test_tool_turn_fans_out_and_supervises_neither_result_nor_headers(kit: Any) -> None:
    """A tool's answer is never supervised, and the template is not append-only."""
    call = "<tool_call>\n{}\n</tool_call>"
    messages = [
        {"role": "user", "content": "Temp?"},
        {"role": "assistant", "content": call},
        {"role": "tool", "content": "18"},
        {"role": "assistant", "content": "It is 18."},
    ]
    renderer = ChatRenderer(kit.make_tokenizer("qwen3"), chat_template_kwargs={"enable_thinking": False})
    rows = kit.texts(renderer, messages)
    assert [spans for _, spans in rows] == [[f"{call}<|im_end|>"], ["It is 18.<|im_end|>"]]
    assert "<think>" in rows[0][0] and f"assistant\n{call}<|im_end|>" in rows[1][0]


def test_end_of_turn_that_is_not_the_eos_is_supervised_and_the_newline_after_it_is_not(kit: Any) -> None:
    ((prompt, spans),) = kit.texts(ChatRenderer(kit.make_tokenizer("gemma")), kit.chat("Hi", "Hello.", "Bye", "Ciao"))
    assert prompt == "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    assert spans == ["Hello.<end_of_turn>", "Ciao<end_of_turn>"]


def test_turn_ends_where_the_target_stops_and_not_at_an_earlier_special_token(kit: Any) -> None:
    """A response in brackets of its own: without its stop ids, the first special token would be taken for the end."""
    tokenizer = kit.make_tokenizer(
        "{% for m in messages %}<|im_start|>{{ m.role }}<|message|>{{ m.content }}<|end|><|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant<|message|>{% endif %}"
    )
    stops = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<eos>"])
    messages = kit.chat("Hi", "Hello.", "Bye", "")
    ((_, spans),) = kit.texts(ChatRenderer(tokenizer, stop_ids=stops), messages)
    assert spans == ["Hello.<|end|><|im_end|>", "<|end|><|im_end|>"]
    ((_, spans),) = kit.texts(ChatRenderer(tokenizer), messages)
    assert spans == ["Hello.<|end|>", "<|end|>"]


def test_tool_call_that_closes_unlike_a_response_ends_at_its_own_first_special_token(kit: Any) -> None:
    tokenizer = kit.make_tokenizer(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.tool_calls %}{{ m.tool_calls[0].name }}<|call|>{% else %}{{ m.content }}<|im_end|>{% endif %}"
        "{{ eos_token if loop.last and not add_generation_prompt }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = kit.chat("Temp?", "", "So?", "18")
    messages[1]["tool_calls"] = [{"name": "look", "arguments": {}}]
    ((_, spans),) = kit.texts(ChatRenderer(tokenizer), messages)
    assert spans == ["look<|call|>", "18<|im_end|>"]


def test_header_that_the_target_writes_itself_is_supervised(kit: Any) -> None:
    rows = kit.texts(ChatRenderer(kit.make_tokenizer("harmony")), kit.chat("Hi", "Hello.", "Bye", "Ciao"))
    assert [spans for _, spans in rows] == [
        ["<|channel|>final<|message|>Hello.<|return|>"],
        ["<|channel|>final<|message|>Ciao<|return|>"],
    ]


def test_template_without_end_of_turn_supervises_the_content_alone(kit: Any) -> None:
    ((_, spans),) = kit.texts(ChatRenderer(kit.make_tokenizer("plain")), kit.chat("Hi", "Hello. ", "Bye", "Ciao"))
    assert spans == ["Hello.", "Ciao"]


@pytest.mark.parametrize(
    "content", ["a<|im_end|>", "<|im_end|>", "a<|im_end|>b", "<|im_start|>user\nfoo", "\n<|im_end|>\nx"]
)
def test_marker_text_inside_the_content_is_content(kit: Any, content: str) -> None:
    ((_, spans),) = kit.texts(ChatRenderer(kit.make_tokenizer("chatml")), kit.chat("x<|im_end|>", content))
    assert spans == [f"{content}<|im_end|>"]


def test_token_that_would_run_across_the_prompt_boundary_is_split_there(kit: Any) -> None:
    """The pair "\\n\\n" is one token of this tokenizer, but a served prompt ends with its own "\\n"."""
    tokenizer = kit.make_tokenizer("chatml", merges=(("Ċ", "Ċ"),))
    assert len(tokenizer("\n\n")["input_ids"]) == 1
    renderer = ChatRenderer(tokenizer)
    messages = kit.chat("Hi", "\nHello.", "Bye", "\n\nCiao")
    results = renderer.encode(renderer.rendered(messages))
    assert not isinstance(results[0], UnusableRow)
    rows = results[0]
    assert len(rows) == 2  # the joint row would hold the second prompt's history tokenised otherwise than it is served
    for row, end in zip(rows, (1, 3), strict=True):
        prompt = render_prompt(tokenizer, messages[:end])
        assert row.input_ids[: len(prompt)] == prompt
        assert row.loss_mask.index(True) == len(prompt)
    assert [spans for _, spans in kit.texts(renderer, messages)] == [["\nHello.<|im_end|>"], ["\n\nCiao<|im_end|>"]]


def test_served_prompt_is_a_prefix_of_the_training_row_with_a_real_tokenizer(
    kit: Any, smollm2: PreTrainedTokenizerBase
) -> None:
    renderer = ChatRenderer(smollm2)
    messages = kit.chat(
        "Sum two numbers.", "```python\ndef add(a, b):\n    return a + b\n```", "Thanks", "\u00dcberall \U0001f600!"
    )
    (result,) = renderer.encode(renderer.rendered(messages))
    assert not isinstance(result, UnusableRow)
    (row,) = result
    ids = smollm2.apply_chat_template(messages, tokenize=True, add_generation_prompt=False, return_dict=False)
    assert row.input_ids == ids
    for end in (1, 3):
        prompt = smollm2.apply_chat_template(
            messages[:end], tokenize=True, add_generation_prompt=True, return_dict=False
        )
        assert row.input_ids[: len(prompt)] == prompt == render_prompt(smollm2, messages[:end])
        assert not row.loss_mask[len(prompt) - 1] and row.loss_mask[len(prompt)]
    assert [spans for _, spans in kit.texts(renderer, messages)] == [
        [f"{messages[1]['content']}<|im_end|>", f"{messages[3]['content']}<|im_end|>"]
    ]
    assert row.input_ids[-1] == smollm2.convert_tokens_to_ids(["\u010a"])[0] and not row.loss_mask[-1]


def test_leading_space_of_a_response_does_not_merge_with_the_prompt(kit: Any, smollm2: PreTrainedTokenizerBase) -> None:
    """With a real vocabulary: jointly tokenised, the prompt's newline and the space would be one token."""
    renderer = ChatRenderer(smollm2)
    messages = kit.chat("Go on.", "  indented\n")
    prompt = render_prompt(smollm2, messages[:1])
    joint = smollm2.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert joint[: len(prompt)] != prompt
    (result,) = renderer.encode(renderer.rendered(messages))
    assert not isinstance(result, UnusableRow)
    assert result[0].input_ids[: len(prompt)] == prompt
    assert [spans for _, spans in kit.texts(renderer, messages)] == [["  indented\n<|im_end|>"]]


def test_slow_tokenizer_gets_the_same_rows(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer without offsets is encoded turn by turn."""
    tokenizer = kit.make_tokenizer("chatml")
    messages = kit.chat("Hi", "caf\u00e9 \U0001f600<|im_end|>", "Bye", "See you.")
    fast = kit.texts(ChatRenderer(tokenizer), messages)
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    slow = kit.texts(ChatRenderer(tokenizer), messages)
    assert [span for _, spans in slow for span in spans] == [span for _, spans in fast for span in spans]


def test_conversation_without_a_response_is_unusable(kit: Any) -> None:
    with pytest.raises(UnusableRow, match="no assistant turn"):
        ChatRenderer(kit.make_tokenizer("chatml")).rendered(kit.chat("Hi"))


def test_template_that_refuses_a_row_says_why(kit: Any) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UnusableRow, match="roles must alternate"):
        ChatRenderer(kit.make_tokenizer(template)).rendered(kit.chat("Hi", "Hello"))


def test_render_that_does_not_extend_the_generation_prompt_is_unusable(kit: Any) -> None:
    template = kit.templates["chatml"].replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n[answer]{% endif %}"
    )
    with pytest.raises(UnusableRow, match="does not extend the generation prompt"):
        ChatRenderer(kit.make_tokenizer(template)).rendered(kit.chat("Hi", "Hello"))


def test_tokenizer_without_chat_template_is_refused(kit: Any) -> None:
    with pytest.raises(ValueError, match=r"has no chat template.*instruct model's tokenizer"):
        ChatRenderer(kit.make_tokenizer(None))


def test_target_without_tokenizer_is_refused(kit: Any) -> None:
    with pytest.raises(ValueError, match="rows with 'input_ids' and 'loss_mask'"):
        ChatRenderer(None)


def test_template_setting_that_the_template_never_reads_is_refused(kit: Any) -> None:
    with pytest.raises(ValueError, match=r"\['enable_thinking'\] is never read.*Correct the spelling"):
        ChatRenderer(kit.make_tokenizer("chatml"), chat_template_kwargs={"enable_thinking": False})


def test_unknown_supervision_is_refused(kit: Any) -> None:
    with pytest.raises(ValueError, match=r"Use one of .*all_turns"):
        ChatRenderer(kit.make_tokenizer("chatml"), supervise="everything")  # type: ignore[arg-type]


def test_prompt_that_tokenises_otherwise_before_a_response_is_kept_as_it_is_served(kit: Any) -> None:
    """This pre-tokenizer looks ahead: alone the prompt ends in one "::", and before an H in two colons."""
    tokenizer = kit.make_tokenizer(
        "{% for m in messages %}{{ m.role }}::{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant::{% endif %}",
        merges=((":", ":"),),
    )
    colons = pre_tokenizers.Split(Regex(":+(?!H)"), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([colons, bytes_])
    messages = kit.chat("Hi", "Hello.")
    prompt = render_prompt(tokenizer, messages[:1])
    assert tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"][: len(prompt)] != prompt
    (row,) = kit.rows(ChatRenderer(tokenizer), messages)
    assert row.input_ids[: len(prompt)] == prompt and row.loss_mask.index(True) == len(prompt)
    assert kit.texts(ChatRenderer(tokenizer), messages) == [("user::Hi<|end|>assistant::", ["Hello.<|end|>"])]
