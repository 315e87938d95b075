"""What a conversation's user (and system) says, without the answers: the input of ``regenerate``."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from dflash_lightning.data.read.messages import Message
from dflash_lightning.data.read.records import BadRecord, Record, format_of, read_records
from dflash_lightning.data.read.rows import ChatRow, PromptRow, parse_prompt
from dflash_lightning.files import find_file


@dataclass(frozen=True)
class Script:
    """Messages of one prompt row that are not answers, in order; every user message is to be answered.

    ``row`` counts the records of the file from 0 and keys the randomness of the answers; ``line`` is where the record
    begins, counted from 1. ``chat_template_kwargs`` are the row's own, over those of the call.
    """

    row: int
    line: int
    messages: tuple[Message, ...]
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """A prompt row that was not answered, or only its first ``answered`` turns, and why."""

    line: int
    row: int
    reason: str
    answered: int = 0


def read_scripts(path: Path | str, limit: int | None = None) -> tuple[list[Script], list[Failure]]:
    """Scripts of the first ``limit`` rows of a file that ``data.records`` can read, and the rows that hold none.

    Raises:
        ValueError: the file is missing, has no row, or cannot be read beyond some place.
    """
    file = Path(path).expanduser()
    file = file if file.is_dir() else find_file(path, setting="prompts")
    scripts: list[Script] = []
    failures: list[Failure] = []
    for row, record in enumerate(islice(read_records(file, format_of(file)), limit)):
        if isinstance(record, BadRecord):
            failures.append(Failure(record.line, row, record.reason))
            continue
        try:
            scripts.append(_script(row, record))
        except ValueError as error:
            failures.append(Failure(record.line, row, str(error).removeprefix(f"line {record.line}: ")))
    if not scripts and not failures:
        raise ValueError(
            f"prompts: {path} holds no rows. Give a file with one prompt a line, e.g. {{'turns': ['...']}}."
        )
    return scripts, failures


def _script(row: int, record: Record) -> Script:
    where = f"line {record.line}"
    parsed = parse_prompt(record.value, where)
    if isinstance(parsed, PromptRow):
        return Script(row, record.line, tuple(parsed.messages), parsed.tools, parsed.chat_template_kwargs)
    if not isinstance(parsed, ChatRow):
        raise ValueError(f"{where}: tokenised rows and plain text are no prompts")
    if any(message["role"] == "tool" or message.get("tool_calls") for message in parsed.messages):
        raise ValueError(f"{where}: what a tool said depends on the old answers, so tool turns cannot be made anew")
    messages = tuple(message for message in parsed.messages if message["role"] != "assistant")
    if not any(message["role"] == "user" for message in messages):
        raise ValueError(f"{where}: no user message, so there is nothing to answer")
    if messages[-1]["role"] != "user":
        raise ValueError(f"{where}: the last message that is not an answer must be the user's")
    return Script(row, record.line, messages, parsed.tools, parsed.chat_template_kwargs)
