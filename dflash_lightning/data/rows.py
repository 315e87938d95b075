"""Reading data files: every record becomes one of three kinds of row, or an error that names file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

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
class PromptRow:
    """User turns without responses."""

    where: str
    turns: list[str]


Row = ChatRow | TokenRow | PromptRow


def read_rows(path: str | Path, *, limit: int | None = None, setting: str = "data") -> Iterator[Row]:
    """Rows of a ``.jsonl`` file (one JSON object a line) or a ``.json`` file (one list), in file order.

    A record holds ``messages`` or ``conversations`` (``role``/``content`` or ShareGPT's ``from``/``value``), ``prompt``
    with ``response``, ``input_ids`` with ``loss_mask``, or ``turns``. Blank lines are skipped. ``limit`` stops after
    that many rows.

    Raises:
        ValueError: a record cannot be read; the message names file and line.
    """
    file = find_file(path, setting=setting)
    for where, record in islice(_records(file), limit):
        yield parse_record(record, where)


def _records(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        if file.suffix == ".json" and _first_character(file) == "[":
            yield from _list_records(file, lines.read())
            return
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{file}:{number}", _parse_json(line, f"{file}:{number}")


def _first_character(file: Path) -> str:
    with file.open(encoding="utf-8") as lines:
        return next((line.lstrip()[0] for line in lines if line.strip()), "")


def _list_records(file: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        records = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{file}:{error.lineno}: not valid JSON ({error.msg}, column {error.colno}). "
            "A .json file holds one list of records; was the file cut off?"
        ) from None
    for number, record in enumerate(records, start=1):
        yield f"{file}, record {number}", record


def _parse_json(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: not valid JSON ({error.msg}, column {error.colno}). "
            "Every line of a .jsonl file is one JSON object; correct or remove this line."
        ) from None


def parse_record(record: Any, where: str) -> Row:
    """The row that one JSON record describes; ``where`` opens every error message."""
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a record is a JSON object, but this is {type(record).__name__}.")
    if "input_ids" in record or "loss_mask" in record:
        return _token_row(record, where)
    for key in ("messages", "conversations"):
        if key in record:
            return ChatRow(where, _messages(record[key], where, key), record.get("tools"))
    if "prompt" in record and "response" in record:
        pair = [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record["response"]}]
        return ChatRow(where, _messages(pair, where, "prompt"))
    if "turns" in record:
        turns = record["turns"]
        if not (isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)):
            raise ValueError(f"{where}: 'turns' must be a list of texts with at least one entry, not {_short(turns)}.")
        return PromptRow(where, turns)
    raise ValueError(
        f"{where}: no known key among {sorted(record)}. A record holds 'messages', 'conversations' or 'prompt' "
        "with 'response' (chat), 'input_ids' with 'loss_mask' (tokenised), or 'turns' (prompts)."
    )


def _token_row(record: dict[str, Any], where: str) -> TokenRow:
    missing = {"input_ids", "loss_mask"} - record.keys()
    if missing:
        raise ValueError(
            f"{where}: {missing.pop()!r} is missing. Tokenised rows need both 'input_ids' and 'loss_mask'."
        )
    ids, mask = record["input_ids"], record["loss_mask"]
    for key, values in (("input_ids", ids), ("loss_mask", mask)):
        if not (isinstance(values, list) and all(isinstance(value, int) for value in values)):
            raise ValueError(f"{where}: {key!r} must be a list of whole numbers, not {_short(values)}.")
    if len(ids) != len(mask):
        raise ValueError(f"{where}: {len(ids)} input_ids but {len(mask)} loss_mask entries. They must be as many.")
    if not set(mask) <= {0, 1}:
        raise ValueError(f"{where}: loss_mask holds {sorted(set(mask) - {0, 1})[:3]}. Use 1 (supervised) and 0.")
    return TokenRow(where, ids, [int(value) for value in mask])


def _messages(value: Any, where: str, key: str) -> list[Message]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: {key!r} must be a list of messages, not {_short(value)}.")
    return [_message(item, where, number) for number, item in enumerate(value, start=1)]


def _message(item: Any, where: str, number: int) -> Message:
    if not isinstance(item, dict) or not ("role" in item or "from" in item):
        raise ValueError(
            f"{where}: message {number} needs 'role' and 'content' (or 'from' and 'value'): {_short(item)}."
        )
    said = item["role"] if "role" in item else item["from"]
    if said not in ROLES:
        raise ValueError(f"{where}: message {number} has role {said!r}. Known roles: {sorted(ROLES)}.")
    content = item["content"] if "content" in item else item.get("value")
    if content is None and "tool_calls" not in item:
        raise ValueError(f"{where}: message {number} ({said}) has no 'content' (or 'value').")
    rest = {k: v for k, v in item.items() if k not in ("role", "from", "content", "value")} if "role" in item else {}
    return {"role": ROLES[said], "content": _text(content, where, number), **rest}


def _text(content: Any, where: str, number: int) -> str:
    """Content as one text; a list of text parts (OpenAI's form) is joined."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: Sequence[Any] = content if isinstance(content, list) else [content]
    if all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    raise ValueError(
        f"{where}: message {number} has content that is not text: {_short(content)}. Only text is supported."
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
