"""What a conversation's user (and system) says, without the answers: the input of ``regenerate``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dflash_lightning.data.rows import ChatRow, Message, PromptRow, parse_record
from dflash_lightning.files import find_file


@dataclass(frozen=True)
class Script:
    """Messages of one prompt row that are not answers, in order; every user message is to be answered."""

    row: int
    messages: tuple[Message, ...]
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Failure:
    """A prompt row that could not be answered, counted from 0, and why."""

    row: int
    reason: str


def read_scripts(path: Path | str, limit: int | None = None) -> tuple[list[Script], list[Failure]]:
    """Scripts of the first ``limit`` rows of a JSONL file, and the rows that hold none; blank lines are no rows.

    Raises:
        ValueError: the file is missing or has no row.
    """
    file = find_file(path, setting="prompts")
    scripts: list[Script] = []
    failures: list[Failure] = []
    with file.open(encoding="utf-8", errors="replace") as lines:
        for row, line in enumerate(islice((line for line in lines if line.strip()), limit)):
            try:
                scripts.append(_script(row, line))
            except ValueError as error:  # a JSONDecodeError is one
                failures.append(Failure(row, str(error)))
    if not scripts and not failures:
        raise ValueError(
            f"prompts: {path} holds no rows. Give a file with one prompt a line, e.g. {{'turns': ['...']}}."
        )
    return scripts, failures


def _script(row: int, line: str) -> Script:
    parsed = parse_record(json.loads(line), f"row {row}")
    if isinstance(parsed, PromptRow):
        return Script(row, tuple({"role": "user", "content": turn} for turn in parsed.turns))
    if not isinstance(parsed, ChatRow):
        raise ValueError(f"row {row}: a tokenised row is not a prompt")
    called = [m["role"] for m in parsed.messages if m["role"] == "tool" or m.get("tool_calls")]
    if called:
        raise ValueError(f"row {row}: what a tool said depends on the old answers, so tool turns cannot be made anew")
    messages = tuple(message for message in parsed.messages if message["role"] != "assistant")
    if not messages or messages[-1]["role"] != "user":
        raise ValueError(f"row {row}: the last message that is not an answer must be the user's")
    return Script(row, messages, parsed.tools)
