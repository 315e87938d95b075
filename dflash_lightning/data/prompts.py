"""Prompts for evaluation: message lists without the answer, and the ids a server would make of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from dflash_lightning.data.conversation import ChatRenderer, UnusableRow
from dflash_lightning.data.rows import ChatRow, Message, PromptRow, Row, TextRow, read_rows


def load_prompts(path: str | Path, limit: int | None = None) -> list[list[Message]]:
    """Message lists to respond to: the first turn of ``turns`` rows, a chat row up to its first assistant turn.

    Raises:
        ValueError: the file is missing or empty, or a row holds no prompt; the message names file and line.
    """
    prompts = [_prompt(row) for row in read_rows(path, limit=limit, setting="prompts")]
    if not prompts:
        raise ValueError(
            f"prompts: {path} holds no rows. Give a file with one prompt a line, e.g. {{'turns': ['...']}}."
        )
    return prompts


def _prompt(row: Row) -> list[Message]:
    if isinstance(row, PromptRow):
        return [{"role": "user", "content": row.turns[0]}]
    if isinstance(row, ChatRow):
        roles = [message["role"] for message in row.messages]
        end = roles.index("assistant") if "assistant" in roles else len(roles)
        if "user" in roles[:end]:
            return row.messages[:end]
        raise ValueError(
            f"{row.where}: no user turn before the first assistant turn, so there is nothing to respond to."
        )
    raise ValueError(
        f"{row.where}: a {'plain text' if isinstance(row, TextRow) else 'tokenised row'} is not a prompt. Prompts are "
        "'turns', 'prompt', 'messages' or 'conversations'."
    )


def render_prompt(
    tokenizer: PreTrainedTokenizerBase | None, messages: Sequence[Message], **chat_template_kwargs: Any
) -> list[int]:
    """Ids of the rendered prompt, generation prompt included: what masks are cut against and what is served."""
    try:
        return ChatRenderer(tokenizer, chat_template_kwargs=chat_template_kwargs).encode_prompt(messages)
    except UnusableRow as error:
        raise ValueError(
            f"prompt {str(messages)[:80]!r}: {error}. Change the prompt, or data.chat_template_kwargs."
        ) from None
