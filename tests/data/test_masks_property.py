"""Any conversation, any template: the supervised text is what follows the served prompt, up to the stop, and no more.

The oracle renders every prefix on its own, by the definition, and knows nothing but the family's stop token. The rows
under test come from whichever path is quickest. Equal means: the ids before a supervised span are the served prompt's,
one by one, and the span reads as the oracle's text.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from dflash_lightning.data import ChatRenderer, UnusableRow

RETYPED = ["chatml", "qwen3", "gemma", "mistral", "phi3", "phi4", "harmony"]
STOCK = ["qwen3", "llama3_1", "gemma3", "deepseek_v3", "gptoss", "smollm2"]
KWARGS = [None, {"enable_thinking": False}]
MARKERS = [
    *("<|im_start|>assistant\n", "<|im_end|>", "<|im_end|>\n", "<|im_start|>", "[INST]", "[/INST]", "</s>", "<eos>"),
    *("<end_of_turn>", "<start_of_turn>model\n", "<|end|>", "<|return|>", "<|start|>assistant", "<|message|>"),
    *("<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<tool_call>", "</tool_call>"),
    *("<\uff5cAssistant\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|endoftext|>", "<|assistant|>\n"),
]
WORDS = [
    "a",
    "b",
    " ",
    "  ",
    "\n",
    "\n\n",
    ".",
    "<",
    "|>",
    "user",
    "assistant",
    "\u00e9",
    "\u4e2d",
    "\U0001f600",
    "1234",
]
# Two bytes that one merge joins run across the boundary between a prompt's newline and a response.
MERGES = (("\u010a", "\u010a"), ("a", "b"), ("\u0120", "a"), ("\u010a", "a"), ("\u010a", "\u0120"))
TEXT = st.lists(st.sampled_from(WORDS + MARKERS), max_size=10).map("".join)
CHATS = st.tuples(st.lists(TEXT, min_size=2, max_size=7), st.none() | TEXT)
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def served(tokenizer: Any, messages: list[Any], kwargs: dict[str, Any], stop: str) -> list[tuple[str, str]] | None:
    """Prompt and supervised text of every response that has a prompt; null where the template allows none."""
    found = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i == 0:
            continue
        try:
            prompt = tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True, **kwargs)
            full = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False, **kwargs)
        except Exception:  # whatever a template raises
            return None
        if not full.startswith(prompt):
            return None
        said = full[len(prompt) :]
        assert message["content"].strip() in said
        found.append((prompt, said[: said.rindex(stop) + len(stop)]))
    return found


@functools.cache
def renderer_of(tokenizer: PreTrainedTokenizerBase, thinking: bool | None = None) -> ChatRenderer:
    kwargs = None if thinking is None else {"enable_thinking": thinking}
    return ChatRenderer(tokenizer, chat_template_kwargs=kwargs)


def check(kit: Any, tokenizer: PreTrainedTokenizerBase, stop: str, messages: list[Any], kwargs: Any = None) -> int:
    """How many turns were compared with the oracle."""
    expected = served(tokenizer, messages, kwargs or {}, stop)
    renderer = renderer_of(tokenizer, **({"thinking": kwargs["enable_thinking"]} if kwargs else {}))
    if not expected:
        with pytest.raises(UnusableRow):
            kit.rows(renderer, messages)
        return 0
    rows = kit.rows(renderer, messages)
    found = [(row, a, b) for row in rows for a, b in kit.spans(row.loss_mask)]
    assert len(found) == len(expected)
    for (row, begin, end), (prompt, said) in zip(found, expected, strict=True):
        assert row.input_ids[:begin] == tokenizer(prompt, add_special_tokens=False)["input_ids"]
        # Some tokenizers normalise text (NFC), so the expected text goes the same way.
        plain = tokenizer.decode(tokenizer(said, add_special_tokens=False)["input_ids"])
        assert tokenizer.decode(row.input_ids[begin:end]) == plain
        assert row.input_ids[end - 1] == tokenizer.convert_tokens_to_ids(stop)
    return len(expected)


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("merges", [(), MERGES], ids=["bytes", "merged"])
@pytest.mark.parametrize("name", RETYPED)
@QUICK
@given(data=st.data())
def test_rows_of_retyped_templates_equal_the_definition(
    kit: Any, name: str, merges: Any, trim_offsets: bool, data: Any
) -> None:
    texts, system = data.draw(CHATS)
    kwargs = data.draw(st.sampled_from(KWARGS)) if name == "qwen3" else None
    tokenizer = kit.make_tokenizer(name, merges, trim_offsets=trim_offsets)
    compared = check(kit, tokenizer, kit.stops[name], kit.chat(*texts, system=system), kwargs)
    assert compared == len(texts) // 2


@pytest.mark.parametrize("name", STOCK)
@QUICK
@given(data=st.data())
def test_rows_of_stock_tokenizers_equal_the_definition(kit: Any, stock: Any, name: str, data: Any) -> None:
    texts, system = data.draw(CHATS)
    kwargs = data.draw(st.sampled_from(KWARGS)) if name == "qwen3" else None
    compared = check(kit, stock(name), kit.stops[f"stock/{name}"], kit.chat(*texts, system=system), kwargs)
    assert compared == len(texts) // 2


@pytest.mark.parametrize("name", ["qwen3", "gptoss"])
@QUICK
@given(data=st.data())
def test_reasoning_is_supervised_where_the_target_writes_it(kit: Any, stock: Any, name: str, data: Any) -> None:
    """With random responses, some with reasoning: the same definition, and the reasoning is in the supervised text."""
    texts, _ = data.draw(CHATS)
    messages = kit.chat(*texts)
    for message in messages[1::2]:
        if data.draw(st.booleans()):
            message["reasoning_content"] = data.draw(st.sampled_from(["why\nnot", "<|im_end|>", "a  b"]))
    assert check(kit, stock(name), kit.stops[f"stock/{name}"], messages) == len(texts) // 2
    spans = [span for _, row in kit.texts(renderer_of(stock(name)), messages) for span in row]
    for span, message in zip(spans, messages[1::2], strict=True):
        assert message.get("reasoning_content", "") in span


@pytest.mark.parametrize("name", RETYPED)
@QUICK
@given(data=st.data())
def test_conversations_that_begin_in_the_middle_equal_the_definition(kit: Any, name: str, data: Any) -> None:
    texts, _ = data.draw(CHATS)
    messages = kit.chat("", *texts)[1:]  # assistant, user, ...
    compared = check(kit, kit.make_tokenizer(name, MERGES), kit.stops[name], messages)
    assert compared == (len(texts) - 1) // 2


@pytest.mark.parametrize("name", [*RETYPED, *(f"stock/{name}" for name in STOCK)])
@QUICK
@given(data=st.data())
def test_marker_text_decides_nothing(kit: Any, name: str, data: Any) -> None:
    """Markers inside messages become special tokens, as they do when served; the regions are those of plain words."""
    parts = st.lists(st.sampled_from(MARKERS), min_size=1, max_size=4)
    layout = data.draw(st.lists(parts, min_size=2, max_size=6))
    renderer = renderer_of(kit.tokenizer(name))
    marked = kit.texts(renderer, kit.chat(*("x".join(["", *markers, ""]) for markers in layout)))
    words = kit.texts(renderer, kit.chat(*("x".join(["", *(f"w{i}" for i in range(len(m))), ""]) for m in layout)))
    assert [len(spans) for _, spans in marked] == [len(spans) for _, spans in words]
    spans = [(a, b) for (_, x), (_, y) in zip(marked, words, strict=True) for a, b in zip(x, y, strict=True)]
    for (span, plain), markers in zip(spans, layout[1::2], strict=True):
        assert span.startswith(plain.split("x")[0]) and span.endswith(plain.rsplit("x", 1)[1])
        assert "x".join(["", *markers, ""]).replace("\u2581", " ") in span.replace("\u2581", " ")


@pytest.mark.parametrize("name", ["chatml", "gemma", "phi4"])
@QUICK
@given(data=st.data())
def test_tokenizer_without_offsets_gets_the_same_supervision(kit: Any, name: str, data: Any) -> None:
    texts, system = data.draw(CHATS)
    messages = kit.chat(*texts, system=system)
    tokenizer = kit.make_tokenizer(name, MERGES)
    fast = [span for _, row in kit.texts(ChatRenderer(tokenizer), messages) for span in row]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(tokenizer), "is_fast", False)
        renderer = ChatRenderer(tokenizer)
        slow = kit.texts(renderer, messages)
    assert [span for _, row in slow for span in row] == fast
