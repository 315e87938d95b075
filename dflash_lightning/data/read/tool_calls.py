"""Spellings of tool calls: arguments as an object or as JSON text, whichever the chat template shows rightly."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from dflash_lightning.data.read.messages import Message

_PROBE = {"_probe_": "x"}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "_probe_name_", "arguments": _PROBE}}
# Conversations that show what a template makes of an object; some templates show calls only where content is null.
PROBES: tuple[list[Message], ...] = tuple(
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": content, "tool_calls": [_CALL]}]
    for content in ("", None)
)


def prints_objects(text: str) -> bool:
    """Whether a rendered probe holds the arguments as Python prints an object: ``{'city': 'Oslo'}``, no JSON."""
    return str(_PROBE) in text


def spellings(messages: Sequence[Message], *, as_text: bool) -> list[Sequence[Message]]:
    """The messages with their calls' arguments in every form worth trying, the best one first.

    Servers hand over an object (OpenAI's format has a text; most templates write ``arguments | tojson``, which would
    quote it once more). A template that can only join texts needs a text; so does one that prints what it gets
    (``as_text``), which would write an object as Python does.
    """
    text = _with_arguments(messages, _as_text)
    return [text] if as_text else [_with_arguments(messages, _as_object), messages, text]


def _with_arguments(messages: Sequence[Message], change: Callable[[Any], Any]) -> list[Message]:
    return [
        {**message, "tool_calls": [_changed(call, change) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _changed(call: Any, change: Callable[[Any], Any]) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _changed(call["function"], change)}
    return {**call, "arguments": change(call.get("arguments"))} if "name" in call else call


def _as_object(arguments: Any) -> Any:
    """JSON text of an object as that object, nothing at all as an empty one (as servers do); else as it is."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_text(arguments: Any) -> Any:
    if arguments is None:
        return "{}"
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
