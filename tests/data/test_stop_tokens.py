"""Stop tokens that only the chat template knows: what it writes behind an answer ends one, whatever is declared."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from dflash_lightning.data import ChatRenderer
from dflash_lightning.target import FrozenTarget, load_target, load_text
from dflash_lightning.target.facts import find_stop_ids
from dflash_lightning.target.turn_end import template_stop_id

# After Llama 3's, DeepSeek-V3's and GLM-4's: an end without newline, an end that is the eos, none but the next header.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|message|>\n\n{{ m.content | trim }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|message|>\n\n{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% else %}<|Assistant|>{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
GLM4 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
OPEN_AT_THE_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if not loop.last or add_generation_prompt %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Harmony as some retype it: the last answer closes as those in history do.
HARMONY_ALWAYS_END = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
RETYPED = {LLAMA3: "<|im_end|>", DEEPSEEK: "</s>", GLM4: "<|user|>", OPEN_AT_THE_END: "<|im_end|>"}
FAMILIES = ("chatml", "qwen3", "always_thinks", "gemma", "mistral", "phi3", "phi4", "harmony", "never_shows_reasoning")


def undeclared(tokenizer: PreTrainedTokenizerBase, eos: str | None = "[INST]") -> tuple[int, ...]:
    """The stop ids of a target whose every file names the same wrong token, or none at all."""
    tokenizer.eos_token = eos
    named = None if eos is None else tokenizer.convert_tokens_to_ids(eos)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return find_stop_ids(
            PretrainedConfig(eos_token_id=named), GenerationConfig(eos_token_id=named), tokenizer, name="tiny"
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_templates_own_end_of_turn_is_found_although_nothing_declares_it(kit: Any, family: str) -> None:
    tokenizer = kit.make_tokenizer(family)
    if family == "never_shows_reasoning":  # ends with the eos itself, so that one stays
        assert template_stop_id(tokenizer) == tokenizer.eos_token_id
        return
    end, other = tokenizer.convert_tokens_to_ids([kit.stops[family], "[INST]"])
    assert undeclared(tokenizer) == tuple(sorted((end, other)))
    assert undeclared(kit.make_tokenizer(family), eos=None) == (end,)


@pytest.mark.parametrize(("template", "end"), RETYPED.items())
def test_other_ways_to_end_a_turn_are_found(kit: Any, template: str, end: str) -> None:
    tokenizer = kit.make_tokenizer(template)
    assert template_stop_id(tokenizer) == tokenizer.convert_tokens_to_ids(end)


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma3", "deepseek_v3", "gptoss", "smollm2"])
def test_stock_tokenizers_end_a_turn_as_their_models_do(kit: Any, stock: Callable, name: str) -> None:
    tokenizer = stock(name)
    assert template_stop_id(tokenizer) == tokenizer.convert_tokens_to_ids(kit.stops[f"stock/{name}"])


@pytest.mark.parametrize("template", ["harmony", HARMONY_ALWAYS_END])
def test_the_end_of_a_message_is_no_end_of_the_turn(kit: Any, template: str) -> None:
    """GPT-OSS closes its analysis with the token that closes an answer in history, and then goes on."""
    tokenizer = kit.make_tokenizer(template)
    assert tokenizer.convert_tokens_to_ids("<|end|>") not in undeclared(tokenizer)


@pytest.mark.parametrize("template", ["plain", None, "{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{% if %}"])
def test_a_template_without_such_a_token_gives_none(kit: Any, template: str | None) -> None:
    assert template_stop_id(kit.make_tokenizer(template)) is None
    assert template_stop_id(None) is None


def test_a_declared_end_is_not_said(kit: Any) -> None:
    tokenizer = kit.make_tokenizer("chatml")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for declared in (end, [end, 7]):
            generation = GenerationConfig(eos_token_id=declared)
            assert end in find_stop_ids(PretrainedConfig(eos_token_id=None), generation, tokenizer)


def test_an_undeclared_end_is_said_and_stops_answers(tmp_path: Path, make_tiny_model: Callable, byte_tokenizer) -> None:
    """Every file of the target names <|endoftext|>: with and without its weights, <|im_end|> is a stop token too."""
    model = make_tiny_model("llama", eos_token_id=260)
    model.save_pretrained(tmp_path)
    tokenizer = type(byte_tokenizer).from_pretrained(saved(byte_tokenizer, tmp_path), eos_token="<|endoftext|>")
    tokenizer.save_pretrained(tmp_path)
    for load in (load_target, load_text):
        message = (
            r"ends an answer with <\|im_end\|> \(259\), which neither.*add it to eos_token_id in generation_config"
        )
        with pytest.warns(UserWarning, match=message):
            assert load(str(tmp_path)).stop_ids == (259, 260)
    with pytest.warns(UserWarning, match="ends an answer with"):
        target = FrozenTarget(model, tokenizer, name="tiny")
    assert target.facts.eos_token_ids == (259, 260)
    renderer = ChatRenderer(tokenizer, stop_ids=target.stop_ids)
    (row,) = renderer.encode(
        renderer.rendered([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])
    )
    supervised = torch.tensor(row[0].input_ids)[torch.tensor(row[0].loss_mask)]
    assert supervised.tolist()[-1] == 259


def saved(tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    tokenizer.save_pretrained(folder)
    return folder
