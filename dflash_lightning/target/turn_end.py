"""Where an answer ends according to the chat template: the token that it writes behind what an assistant said.

A target was taught to generate that token at the end of its turn, whatever its configuration files name. Where none of
them names it, answers run on into user turns that the target invents, up to the limit of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

_ANSWER, _QUESTION, _THOUGHT = "_an_answer_", "_a_question_", "_a_thought_"
# What templates raise on messages they do not foresee: a field that is missing, null or of another kind.
TEMPLATE_ERRORS = (
    *(TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError),
)
_REASONING = ("reasoning_content", "thinking", "reasoning")  # fields that templates read it from
# Harmony (GPT-OSS) writes a turn as several messages, each closed by <|end|>: that ends a message, not the turn.
_CHANNEL_MARKS = ("<|channel|>", "<|message|>")
_END_OF_MESSAGE = "<|end|>"


def template_stop_id(tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    """The special token that the chat template writes directly behind an answer; null where there is none.

    A token that also stands inside a turn, between reasoning and answer or where a turn begins, ends no turn.
    """
    if tokenizer is None or not tokenizer.chat_template:
        return None
    tokens = {str(token): token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
    tokens |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    question = {"role": "user", "content": _QUESTION}
    answer = {"role": "assistant", "content": _ANSWER}
    last = _render(tokenizer, [question, answer])
    middle = _render(tokenizer, [question, answer, question])
    behind = [text.rpartition(_ANSWER)[2] if _ANSWER in text else "" for text in (last, middle)]
    behind[1] = behind[1].partition(_QUESTION)[0]
    found = next((token for text in behind if (token := _first_token(text, tokens)) is not None), None)
    if found is None or found in _inside_a_turn(tokenizer, question, tokens):
        return None
    if found == _END_OF_MESSAGE and all(mark in last + middle for mark in _CHANNEL_MARKS):
        return None
    return tokens[found]


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], **settings: Any) -> str:
    """The template's text; empty where it refuses these messages."""
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **settings))
    except TEMPLATE_ERRORS:
        return ""


def _first_token(text: str, tokens: Iterable[str]) -> str | None:
    """The token with which ``text`` begins, white space aside: the longest one that fits."""
    text = text.lstrip()
    return max((token for token in tokens if token and text.startswith(token)), key=len, default=None)


def _inside_a_turn(tokenizer: PreTrainedTokenizerBase, question: dict[str, str], tokens: Iterable[str]) -> set[str]:
    """Tokens that open an assistant's turn, or that stand between a turn's reasoning and its answer."""
    prompt = _render(tokenizer, [question], add_generation_prompt=True).rpartition(_QUESTION)[2].lstrip()
    pieces = [prompt.removeprefix(_first_token(prompt, tokens) or "")]  # which closes the question, where one does
    for field in _REASONING:
        text = _render(tokenizer, [question, {"role": "assistant", "content": _ANSWER, field: _THOUGHT}])
        if _THOUGHT in text and _ANSWER in text:
            pieces.append(text.rpartition(_ANSWER)[0].rpartition(_THOUGHT)[2])
    longest_first = sorted((token for token in tokens if token), key=len, reverse=True)
    token = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
    return {match for piece in pieces for match in token.findall(piece)}
