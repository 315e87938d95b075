"""Records of data files as rows: every record is read for what it is, or refused by file and line, never guessed at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from dflash_lightning.data.records import BadRecord, format_of, read_records
from dflash_lightning.files import find_file

# Spellings of ShareGPT's ``from`` and of ``role`` that occur in the wild, and the role that chat templates know.
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
}
Message = dict[str, Any]
Kind = Literal[
    "tokens", "messages", "conversations", "alpaca", "response", "completion", "turns", "text", "code", "prompt"
]
# Keys that make a record of each kind. What a kind needs must all be there; "prompt" is what is left of a pair.
KINDS: dict[Kind, tuple[str, ...]] = {
    "tokens": ("input_ids", "loss_mask"),
    "messages": ("messages",),
    "conversations": ("conversations",),
    "alpaca": ("instruction", "output"),
    "response": ("prompt", "response"),
    "completion": ("prompt", "completion"),
    "turns": ("turns",),
    "text": ("text",),
    "code": ("task_id", "prompt", "entry_point"),
    "prompt": ("prompt",),
}
# How a function that lacks its body is asked for: a chat model needs to be told what to do with it.
_CODE_TURN = (
    "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{code}\n```"
)


@dataclass(frozen=True)
class ChatRow:
    """A conversation; ``tools`` are function schemas for the chat template, or null."""

    where: str
    messages: list[Message]
    tools: list[Any] | None = None


@dataclass(frozen=True)
class TokenRow:
    """Ids and mask that somebody else made; used verbatim."""

    where: str
    input_ids: list[int]
    loss_mask: list[int]


@dataclass(frozen=True)
class TextRow:
    """Plain text without turns, for drafters of base models: no chat template touches it.

    All its tokens are supervised but the first one and those that the tokenizer puts around every text (BOS): whatever
    comes after a token is what the target would be asked to continue with, and nothing comes before the first.
    """

    where: str
    text: str


@dataclass(frozen=True)
class PromptRow:
    """User turns without responses."""

    where: str
    turns: list[str]


Row = ChatRow | TokenRow | TextRow | PromptRow


def read_rows(path: str | Path, *, limit: int | None = None, setting: str = "data") -> Iterator[Row]:
    """Rows of one file in file order, strictly: for files in which a bad record is a mistake (see ``parse_record``).

    JSON lines, a JSON list, Parquet or a saved data set, compressed or not. ``limit`` stops after that many rows.

    Raises:
        ValueError: a record cannot be read; the message names file and line.
    """
    file = Path(path).expanduser()
    file = file if file.is_dir() else find_file(path, setting=setting)
    for record in islice(read_records(file, format_of(file)), limit):
        if isinstance(record, BadRecord):
            raise ValueError(f"{record.where}: {record.reason}")
        yield parse_record(record.value, record.where)


def parse_record(record: Any, where: str, kind: Kind | None = None) -> Row:
    """The row that one record describes; ``where`` opens every error message.

    ============================================= ================================================================
    ``input_ids`` with ``loss_mask``              tokenised, used verbatim, whatever else the record holds
    ``messages`` or ``conversations``             chat, as ``role``/``content`` or ShareGPT's ``from``/``value``
    ``instruction`` (``input``) with ``output``   one exchange (Alpaca); an ``input`` follows after a blank line
    ``prompt`` with ``response`` or ``completion`` one exchange
    ``turns``, or ``prompt`` alone                user turns without answers
    ``prompt`` with ``task_id``, ``entry_point``  the head of a Python function (HumanEval), put into a user turn
    ``text``                                      plain text
    ============================================= ================================================================

    A key whose value is null counts as absent (tables have every column in every row). ``kind`` says how to read a
    record that could be several of these.

    Raises:
        ValueError: it is none of them, or more than one.
    """
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a record is a JSON object, but this is {type(record).__name__}.")
    given = {key: value for key, value in record.items() if value is not None}
    kind = _kind_of(given, where) if kind is None else kind
    missing = [key for key in KINDS[kind] if key not in given]
    if missing:
        keys = " and ".join(repr(key) for key in KINDS[kind])
        need = f"both {keys}" if len(KINDS[kind]) > 1 else keys
        raise ValueError(f"{where}: {missing[0]!r} is missing. Rows of kind {kind!r} need {need}.")
    if kind == "tokens":
        return _token_row(given, where)
    if kind == "turns":
        return PromptRow(where, _turns(given["turns"], where))
    if kind == "prompt":
        return PromptRow(where, [_checked_text(given["prompt"], where, "prompt")])
    if kind == "code":
        code = _checked_text(given["prompt"], where, "prompt").strip("\n")
        return PromptRow(where, [_CODE_TURN.format(code=code)])
    if kind == "text":
        return TextRow(where, _checked_text(given["text"], where, "text"))
    tools = given.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"{where}: 'tools' must be a list of function schemas, not {_short(tools)}.")
    if kind in ("messages", "conversations"):
        return ChatRow(where, _messages(given[kind], where, kind), tools)
    return ChatRow(where, _exchange(given, kind, where), tools)


def _kind_of(given: Mapping[str, Any], where: str) -> Kind:
    if "input_ids" in given or "loss_mask" in given:
        return "tokens"
    found: list[Kind] = [kind for kind, keys in KINDS.items() if kind != "prompt" and all(key in given for key in keys)]
    if len(found) > 1:
        raise ValueError(
            f"{where}: could be read as {' or as '.join(repr(kind) for kind in found)}. Remove the other keys, or say "
            f"which in data.train: [{{path: ..., kind: {found[0]}}}]."
        )
    if found:
        return found[0]
    if "prompt" in given:
        return "prompt"
    raise ValueError(
        f"{where}: no known key among {sorted(map(str, given))}. A record holds 'messages', 'conversations', 'prompt' "
        "with 'response', 'instruction' with 'output' (chat), 'text' (plain), 'input_ids' with 'loss_mask' "
        "(tokenised), or 'turns' (prompts)."
    )


def _token_row(given: Mapping[str, Any], where: str) -> TokenRow:
    ids, mask = given["input_ids"], given["loss_mask"]
    for key, values in (("input_ids", ids), ("loss_mask", mask)):
        if not (isinstance(values, list) and all(isinstance(value, int) for value in values)):
            raise ValueError(f"{where}: {key!r} must be a list of whole numbers, not {_short(values)}.")
    if len(ids) != len(mask):
        raise ValueError(f"{where}: {len(ids)} input_ids but {len(mask)} loss_mask entries. They must be as many.")
    if not set(mask) <= {0, 1}:
        raise ValueError(f"{where}: loss_mask holds {sorted(set(mask) - {0, 1})[:3]}. Use 1 (supervised) and 0.")
    return TokenRow(where, ids, [int(value) for value in mask])


def _turns(turns: Any, where: str) -> list[str]:
    if not (isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)):
        raise ValueError(f"{where}: 'turns' must be a list of texts with at least one entry, not {_short(turns)}.")
    return [_checked_text(turn, where, "turns") for turn in turns]


def _exchange(given: Mapping[str, Any], kind: Kind, where: str) -> list[Message]:
    """One user and one assistant message, after a system message where the record has one."""
    question, answer = KINDS[kind]
    if given.get("history"):
        raise ValueError(f"{where}: 'history' is not read. Write the whole conversation as 'messages'.")
    asked = _checked_text(given[question], where, question)
    if kind == "alpaca" and given.get("input"):
        asked = f"{asked}\n\n{_checked_text(given['input'], where, 'input')}"
    messages = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": _checked_text(given[answer], where, answer)},
    ]
    if given.get("system"):
        messages.insert(0, {"role": "system", "content": _checked_text(given["system"], where, "system")})
    return messages


def _messages(value: Any, where: str, key: str) -> list[Message]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: {key!r} must be a list of messages, not {_short(value)}.")
    return [_message(item, where, number) for number, item in enumerate(value, start=1)]


def _message(item: Any, where: str, number: int) -> Message:
    if not isinstance(item, dict) or not ("role" in item or "from" in item):
        raise ValueError(
            f"{where}: message {number} needs 'role' and 'content' (or 'from' and 'value'): {_short(item)}."
        )
    given = {key: value for key, value in item.items() if value is not None}
    at = f"{where}: message {number}"
    said = _one_of(given, "role", "from", at)
    if not isinstance(said, str) or said not in ROLES:
        raise ValueError(f"{at} has role {said!r}. Known roles: {sorted(ROLES)}.")
    content = _one_of(given, "content", "value", f"{at} ({said})")
    if content is None and not ("role" in given and "tool_calls" in given):
        raise ValueError(f"{at} ({said}) has no 'content' (or 'value').")
    if given.get("weight", 1) != 1:
        raise ValueError(
            f"{at} has weight {given['weight']!r}, which is not applied. Remove the message or the weight; to train on "
            "the last answer only set data.supervise=last_turn."
        )
    rest = {k: v for k, v in given.items() if k not in ("role", "from", "content", "value", "weight")}
    return {"role": ROLES[said], "content": _text(content, where, number), **(rest if "role" in given else {})}


def _one_of(given: Mapping[str, Any], key: str, other: str, at: str) -> Any:
    """The value under either spelling; both at once must agree."""
    if key in given and other in given:
        mine, theirs = given[key], given[other]
        if mine != theirs and (key != "role" or ROLES.get(str(mine)) != ROLES.get(str(theirs))):
            raise ValueError(f"{at} has {key!r} and {other!r}, which differ. Remove one.")
    return given[key] if key in given else given.get(other)


def _text(content: Any, where: str, number: int) -> str:
    """Content as one text; a list of text parts (OpenAI's form) is joined."""
    at = f"message {number}"
    if content is None or isinstance(content, str):
        return _checked_text(content or "", where, at)
    parts: Sequence[Any] = content if isinstance(content, list) else [content]
    if all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        return _checked_text("".join(part["text"] for part in parts), where, at)
    raise ValueError(
        f"{where}: message {number} has content that is not text: {_short(content)}. Only text is supported."
    )


def _checked_text(value: Any, where: str, key: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {key!r} must be text, not {_short(value)}.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: {key!r} holds half a character (character {error.start + 1} is a lone surrogate). "
            "Mend the text, or remove this row."
        ) from None
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
