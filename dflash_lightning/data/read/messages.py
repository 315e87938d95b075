"""Messages of a conversation in the one form that is rendered, and what their marks say about the answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_lightning.data.read.marks import check_marks, is_cut, is_learned, is_message_key, plain
from dflash_lightning.data.read.values import from_json_text, is_empty, joined_text, short

# Spellings, without case and separators, of ShareGPT's ``from`` and of ``role`` that occur in the wild, and the role
# that chat templates know.
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ai": "assistant",
    "bot": "assistant",
    "prompter": "user",
    "ipython": "tool",
    **dict.fromkeys(("toolresponse", "toolresult", "functionresponse", "functionresult"), "tool"),
}
# Roles of ShareGPT whose text is a tool call, or several.
_CALLERS = ("functioncall", "toolcall")
# Names under which messages carry reasoning; transformers passes each to the template under the name that it reads.
REASONING = ("reasoning_content", "thinking", "reasoning")
_CALLS = ("tool_calls", "function_call")
_MEDIA = ("image", "images", "audio", "audios", "video", "videos")
Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages, and the places of the answers that are not to be learned or whose end was cut off."""

    messages: list[Message]
    unlearned: frozenset[int] = frozenset()
    cut: frozenset[int] = frozenset()


def read_messages(value: Any, where: str, key: str) -> Conversation:
    """The messages under ``key``, in OpenAI's form (``role``, ``content``) or ShareGPT's (``from``, ``value``).

    Marks (``train: false``, ``weight: 0``, ...) and finish reasons are read off and not shown to the template. Only
    answers are ever supervised, so marks of other messages say nothing.

    Raises:
        ValueError: a message cannot be read; says which.
    """
    value = from_json_text(value)
    if not isinstance(value, list):
        raise ValueError(f"{where}: {key!r} must be a list of messages, not {short(value)}.")
    messages: list[Message] = []
    unlearned, cut = set(), set()
    calling = False
    for number, item in enumerate(map(from_json_text, value), start=1):
        given = _given(item, where, number)
        message = _message(given, where, number)
        was_calling, calling = calling, _is_call(given)
        if was_calling and calling:  # calls in a row are one answer
            messages[-1]["tool_calls"] += message["tool_calls"]
        else:
            messages.append(message)
        if message["role"] == "assistant":
            check_marks(given, f"{where}: message {number}")
            if not is_learned(given, f"{where}: message {number}"):
                unlearned.add(len(messages) - 1)
            if is_cut(given):
                cut.add(len(messages) - 1)
    return Conversation(messages, frozenset(unlearned), frozenset(cut))


def _given(item: Any, where: str, number: int) -> dict[str, Any]:
    if not isinstance(item, dict) or not ("role" in item or "from" in item):
        raise ValueError(
            f"{where}: message {number} needs 'role' and 'content' (or 'from' and 'value'): {short(item)}."
        )
    return {key: value for key, value in item.items() if value is not None}


def _message(given: Mapping[str, Any], where: str, number: int) -> Message:
    at = f"{where}: message {number}"
    said = _one_of(given, "role", "from", at)
    content = _one_of(given, "content", "value", f"{at} ({said})")
    if _is_call(given):
        return {"role": "assistant", "content": "", "tool_calls": _said_calls(content, at)}
    role = ROLES.get(plain(said)) if isinstance(said, str) else None
    if role is None:
        raise ValueError(f"{at} has role {said!r}. Known roles: {sorted([*ROLES, *_CALLERS])}.")
    if content is None and not ("role" in given and any(key in given for key in _CALLS)):
        raise ValueError(f"{at} ({said}) has no 'content' (or 'value').")
    rest = {k: v for k, v in given.items() if k not in ("role", "from", "content", "value") and not is_message_key(k)}
    if "role" not in given:  # ShareGPT's messages carry all kinds of notes
        rest = {key: value for key, value in rest.items() if key in _CALLS or key in REASONING}
    rest = _with_calls(rest, at)
    if media := [key for key in _MEDIA if not is_empty(given.get(key))]:
        raise ValueError(f"{at} has {media[0]!r}, which cannot be shown to a text model. Remove this row.")
    return {"role": role, "content": joined_text(content, where, f"message {number}"), **rest}


def _with_calls(rest: dict[str, Any], at: str) -> dict[str, Any]:
    """Tool calls as a list of objects, also where they are JSON text or OpenAI's older ``function_call``."""
    rest = dict(rest)
    older = from_json_text(rest.pop("function_call", None))
    if not is_empty(older):
        if not isinstance(older, dict) or not is_empty(rest.get("tool_calls")):
            raise ValueError(f"{at} has a 'function_call' beside 'tool_calls', or one that is no object. Remove one.")
        rest["tool_calls"] = [{"type": "function", "function": older}]
    if "tool_calls" not in rest:
        return rest
    calls = from_json_text(rest["tool_calls"])
    calls = [] if is_empty(calls) else calls
    calls = [from_json_text(call) for call in calls] if isinstance(calls, list) else calls
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{at}: 'tool_calls' must be a list of calls, not {short(rest['tool_calls'])}.")
    return {**rest, "tool_calls": calls}


def _is_call(given: Mapping[str, Any]) -> bool:
    """Whether the whole message is a tool call of ShareGPT's kind."""
    said = given.get("role", given.get("from"))
    return isinstance(said, str) and plain(said) in _CALLERS


def _said_calls(content: Any, at: str) -> list[dict[str, Any]]:
    """The calls that a ShareGPT turn (``from: function_call``) consists of: one object with a name, or a list."""
    found = from_json_text(content)
    calls = [from_json_text(call) for call in (found if isinstance(found, list) else [found])]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise ValueError(
            f'{at} is a tool call, and must be JSON such as {{"name": ..., "arguments": ...}}, not {short(content)}.'
        )
    return [{"type": "function", "function": call} for call in calls]


def _one_of(given: Mapping[str, Any], key: str, other: str, at: str) -> Any:
    """The value under either spelling; both at once must agree."""
    if key in given and other in given:
        mine, theirs = given[key], given[other]
        if mine != theirs and (key != "role" or ROLES.get(plain(str(mine))) != ROLES.get(plain(str(theirs)))):
            raise ValueError(f"{at} has {key!r} and {other!r}, which differ. Remove one.")
    return given[key] if key in given else given.get(other)
