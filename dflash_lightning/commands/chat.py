"""A conversation in the terminal."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any

from dflash_lightning.commands.answer import Answer, Answerer
from dflash_lightning.data import render_prompt
from dflash_lightning.target.room import most_new_tokens

with contextlib.suppress(ImportError):
    import readline  # noqa: F401 (arrow keys in what is typed)

FIRST = {"role": "user", "content": "Hello"}  # a conversation that the target can answer can begin so
_HELP = "/reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C ends an answer."


def chat(answerer: Answerer, chat_template_kwargs: dict[str, Any]) -> None:
    """Answer what is typed, with all that was said before it, until the end of the input or ``/exit``."""
    target = answerer.target
    messages: list[dict[str, Any]] = []
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a byte that is no UTF-8 must not end the conversation
    print(f"{target.facts.name}. {_HELP}", file=sys.stderr, flush=True)
    while (text := _read()) is not None:
        if text in ("/exit", "/quit"):
            return
        if text == "/help":
            print(_HELP, file=sys.stderr, flush=True)
        elif text == "/reset":
            messages = []
            print("[forgotten]", file=sys.stderr, flush=True)
        elif text:
            messages = _turn(answerer, messages, text, chat_template_kwargs)


def _turn(
    answerer: Answerer, messages: list[dict[str, Any]], text: str, chat_template_kwargs: dict[str, Any]
) -> list[dict[str, Any]]:
    """The conversation after one more question and its answer; as it was where there can be none."""
    target = answerer.target
    asked = [*messages, {"role": "user", "content": text}]
    try:
        prompt = render_prompt(target.tokenizer, asked, vocab_size=target.facts.vocab_size, **chat_template_kwargs)
    except ValueError as error:
        print(f"[{error}]", file=sys.stderr, flush=True)
        return messages
    positions = target.facts.max_positions
    room = most_new_tokens(len(prompt), positions, answerer.num_drafts)
    if room < 1:
        print(
            f"[no room for an answer: the conversation takes {len(prompt)} of {positions} positions. /reset forgets "
            "it; or ask something shorter]",
            file=sys.stderr,
            flush=True,
        )
        return messages
    answer = answerer.until_interrupted(prompt, max_new_tokens=min(answerer.settings.max_new_tokens, room))
    print(answer.line(), file=sys.stderr, flush=True)
    return [*asked, {"role": "assistant", "content": _said(answer, answerer)}]


def _said(answer: Answer, answerer: Answerer) -> str:
    """The answer as the chat template is given it: without the stop token, which the template writes itself."""
    ids = answer.ids
    if ids and ids[-1] in answerer.target.stop_ids:
        ids = ids[:-1]
    tokenizer: Any = answerer.target.tokenizer
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _read() -> str | None:
    """The next line without spaces around it; null at the end of the input. Ctrl-C empties the line."""
    try:
        if sys.stdin.isatty():
            return input("> ").strip()
        line = sys.stdin.readline()
        return line.strip() if line else None
    except EOFError:
        print(file=sys.stderr)
        return None
    except KeyboardInterrupt:
        print(f"\n{_HELP}", file=sys.stderr, flush=True)
        return ""
