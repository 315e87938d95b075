"""Prompts for evaluation: what a server would be asked, and the ids it would make of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from dflash_lightning.data.read.conversation import ChatRenderer, UnusableRow
from dflash_lightning.data.read.messages import Message
from dflash_lightning.data.read.records import BadRecord, format_of, read_records
from dflash_lightning.data.read.rows import ChatRow, PromptRow, Row, TextRow, parse_prompt
from dflash_lightning.errors import SettingError
from dflash_lightning.files import find_file

_FURTHER_TURNS = "asked only the first of several turns, because no answers between them are recorded"
_BEHIND = "asked up to the last question, without the answer recorded behind it"
_ANSWERED = ("user", "tool")  # roles that a server answers


@dataclass(frozen=True)
class Prompt:
    """A conversation up to the message that is to be answered, as it would be served: with its tools and settings.

    ``left_out`` counts messages of the row that are not asked, ``why`` says which (empty where none are). ``where`` is
    file and line.
    """

    messages: list[Message]
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    where: str = ""
    left_out: int = 0
    why: str = ""

    @classmethod
    def of(cls, messages: Prompt | Sequence[Message]) -> Prompt:
        """A prompt as it is, or a plain message list as one."""
        return messages if isinstance(messages, Prompt) else cls(list(messages))

    @property
    def name(self) -> str:
        """File and line, or the beginning of what is asked."""
        return self.where or f"prompt {str(self.messages)[:80]!r}"

    def encode(self, renderer: ChatRenderer) -> list[int]:
        """Ids that a server would feed the target.

        Raises:
            UnusableRow: the chat template refuses it, or a token has no row in the target's embedding.
        """
        return renderer.with_settings(self.chat_template_kwargs).encode_prompt(self.messages, self.tools)


def load_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Prompts of a file: the first turn of ``turns``, a conversation up to the last message that is not an answer.

    Tokenised rows that hold their messages too, such as those of ``regenerate``, are read by these. What rows leave out
    is said by ``left_out_line``.

    Raises:
        ValueError: the file is missing or empty, or a row holds no prompt; the message names file and line.
    """
    file = Path(path).expanduser()
    file = file if file.is_dir() else find_file(path, setting="prompts")
    prompts = []
    for record in islice(read_records(file, format_of(file)), limit):
        if isinstance(record, BadRecord):
            raise ValueError(f"{record.where}: {record.reason}")
        prompts.append(_prompt(parse_prompt(record.value, record.where)))
    if not prompts:
        raise SettingError(
            "prompts", f"{path} holds no rows", do="Give a file with one prompt a line, e.g. {'turns': ['...']}"
        )
    return prompts


def _prompt(row: Row) -> Prompt:
    if isinstance(row, PromptRow):
        more = len(row.turns) - 1
        messages = row.messages[: len(row.messages) - more]
        return Prompt(messages, row.tools, row.chat_template_kwargs, row.where, more, _FURTHER_TURNS if more else "")
    if isinstance(row, ChatRow):
        roles = [message["role"] for message in row.messages]
        if "user" not in roles:
            raise ValueError(f"{row.where}: no user turn, so there is nothing to respond to.")
        end = max(place for place, role in enumerate(roles) if role in _ANSWERED) + 1
        behind = len(roles) - end
        return Prompt(
            row.messages[:end], row.tools, row.chat_template_kwargs, row.where, behind, _BEHIND if behind else ""
        )
    raise ValueError(
        f"{row.where}: a {'plain text' if isinstance(row, TextRow) else 'tokenised row'} is not a prompt. Prompts are "
        "'turns', 'prompt', 'messages' or 'conversations'."
    )


def left_out_line(prompts: Sequence[Prompt]) -> str | None:
    """What the prompts' rows hold and is not asked, counted in one line; null where all is asked."""
    rows = Counter(prompt.why for prompt in prompts if prompt.why)
    if not rows:
        return None
    parts = []
    for why, count in sorted(rows.items()):
        messages = sum(prompt.left_out for prompt in prompts if prompt.why == why)
        verb, noun = "is" if count == 1 else "are", "message" if messages == 1 else "messages"
        parts.append(f"{count} {verb} {why} ({messages} {noun} left out)")
    return f"prompts: of {len(prompts)} rows {'; '.join(parts)}"


def render_prompt(
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: Prompt | Sequence[Message],
    *,
    vocab_size: int | None = None,
    **chat_template_kwargs: Any,
) -> list[int]:
    """Ids of the rendered prompt, generation prompt included: what masks are cut against and what is served.

    ``vocab_size`` are the rows of the target's embedding (null: not checked). A prompt's own template settings stand
    over ``chat_template_kwargs``.

    Raises:
        ValueError: names file and line where the template refuses the prompt, or the target has no row for a token.
    """
    asked = Prompt.of(prompt)
    renderer = ChatRenderer(tokenizer, chat_template_kwargs=chat_template_kwargs, vocab_size=vocab_size)
    try:
        return asked.encode(renderer)
    except UnusableRow as error:
        raise ValueError(f"{asked.name}: {error}. Change the prompt, or data.chat_template_kwargs.") from None
