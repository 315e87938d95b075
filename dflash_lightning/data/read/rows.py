"""Records of data files as rows: every record is read for what it is, or refused by file and line, never guessed at."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from dflash_lightning.data.read.beside import OTHER_READINGS, check_copies, read_beside
from dflash_lightning.data.read.messages import Conversation, Message, read_messages
from dflash_lightning.data.read.records import BadRecord, format_of, read_records
from dflash_lightning.data.read.token_columns import check_tokens
from dflash_lightning.data.read.values import check_whole, checked_text, short
from dflash_lightning.files import find_file

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
    """A conversation; ``tools`` are function schemas for the chat template, or null.

    ``chat_template_kwargs`` are settings of the template for this row, over those of the run. ``unlearned`` are the
    places of answers that are marked as not to be trained on, ``cut`` of those whose end a limit cut off.
    """

    where: str
    messages: list[Message]
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    unlearned: frozenset[int] = frozenset()
    cut: frozenset[int] = frozenset()

    def only(self, places: Sequence[int]) -> ChatRow:
        """The same row with some of its messages."""
        unlearned, cut = (
            frozenset(new for new, old in enumerate(places) if old in marked) for marked in (self.unlearned, self.cut)
        )
        messages = [self.messages[place] for place in places]
        return ChatRow(self.where, messages, self.tools, self.chat_template_kwargs, unlearned, cut)


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
    """User turns without responses, with the system text, tools and template settings of the row."""

    where: str
    turns: list[str]
    system: str | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def messages(self) -> list[Message]:
        """The turns as messages, after the system text."""
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*opening, *({"role": "user", "content": turn} for turn in self.turns)]


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


def parse_record(record: Any, where: str, kind: Kind | None = None, ignore: Collection[str] = ()) -> Row:
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

    Beside all but tokens and text, ``system``, ``tools``, ``reasoning``, ``chat_template_kwargs`` and a finish reason
    are used in any of their spellings; what else would change the text the model sees (``history``, ``context``,
    ``images``, ...) is refused by name (see ``data.beside``). Messages may be marked (see ``data.marks``).

    A key whose value is null counts as absent (tables have every column in every row). ``kind`` says how to read a
    record that could be several of these, ``ignore`` which keys are not read at all.

    Raises:
        ValueError: it is none of them, or more than one; or a part of it would be lost.
    """
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a record is a JSON object, but this is {type(record).__name__}.")
    given = {key: value for key, value in record.items() if value is not None and key not in ignore}
    is_said, kind = kind is not None, _kind_of(given, where) if kind is None else kind
    missing = [key for key in KINDS[kind] if key not in given]
    if missing:
        keys = " and ".join(repr(key) for key in KINDS[kind])
        need = f"both {keys}" if len(KINDS[kind]) > 1 else keys
        raise ValueError(f"{where}: {missing[0]!r} is missing. Rows of kind {kind!r} need {need}.")
    if kind == "tokens":
        return _token_row(given, where)
    if kind == "text":
        return TextRow(where, checked_text(given["text"], where, "text"))
    own = {*KINDS[kind], "input"} if kind == "alpaca" else {*KINDS[kind]}
    beside = read_beside(given, where, own)
    if kind in ("turns", "prompt", "code"):
        row: ChatRow | PromptRow = PromptRow(
            where, _turns(given, kind, where), beside.system, beside.tools, beside.chat_template_kwargs
        )
    else:
        made = beside.apply(_conversation(given, kind, where))
        row = ChatRow(where, made.messages, beside.tools, beside.chat_template_kwargs, made.unlearned, made.cut)
    for key, value in _unread_texts(row):
        check_whole(value, where, key)
    # Where the kind is said, keys of the other reading of the record say nothing.
    check_copies(given, where, {*own, *(OTHER_READINGS if is_said else ())}, row.messages)
    return row


def parse_prompt(record: Any, where: str) -> Row:
    """A record read as a prompt: of a tokenised one its messages, which ``regenerate`` and others write beside the ids.

    Raises:
        ValueError: as ``parse_record``.
    """
    if isinstance(record, dict) and record.get("input_ids") is not None and record.get("messages") is not None:
        record = {key: value for key, value in record.items() if key not in ("input_ids", "loss_mask")}
        return parse_record(record, where, "messages")
    return parse_record(record, where)


def _kind_of(given: Mapping[str, Any], where: str) -> Kind:
    found: list[Kind] = [kind for kind, keys in KINDS.items() if kind != "prompt" and all(key in given for key in keys)]
    if "input_ids" in given or ("loss_mask" in given and not found):
        return "tokens"
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
            raise ValueError(f"{where}: {key!r} must be a list of whole numbers, not {short(values)}.")
    if len(ids) != len(mask):
        raise ValueError(f"{where}: {len(ids)} input_ids but {len(mask)} loss_mask entries. They must be as many.")
    if not set(mask) <= {0, 1}:
        raise ValueError(f"{where}: loss_mask holds {sorted(set(mask) - {0, 1})[:3]}. Use 1 (supervised) and 0.")
    check_tokens(given, where, ids, mask)
    return TokenRow(where, ids, [int(value) for value in mask])


def _unread_texts(row: ChatRow | PromptRow) -> Iterator[tuple[str, Any]]:
    """Parts of a row that go to the chat template without having been looked at."""
    yield from (("tools", row.tools), ("chat_template_kwargs", row.chat_template_kwargs))
    for number, message in enumerate(row.messages, start=1):
        if len(message) > 2:  # more than role and content
            yield f"message {number}", message


def _turns(given: Mapping[str, Any], kind: Kind, where: str) -> list[str]:
    if kind == "turns":
        turns = given["turns"]
        if not (isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)):
            raise ValueError(f"{where}: 'turns' must be a list of texts with at least one entry, not {short(turns)}.")
        return [checked_text(turn, where, "turns") for turn in turns]
    asked = checked_text(given["prompt"], where, "prompt")
    return [_CODE_TURN.format(code=asked.strip("\n"))] if kind == "code" else [asked]


def _conversation(given: Mapping[str, Any], kind: Kind, where: str) -> Conversation:
    """The messages of the record, or one user and one assistant message of a pair."""
    if kind in ("messages", "conversations"):
        return read_messages(given[kind], where, kind)
    question, answer = KINDS[kind]
    asked = checked_text(given[question], where, question)
    if kind == "alpaca" and given.get("input"):
        asked = f"{asked}\n\n{checked_text(given['input'], where, 'input')}"
    messages: list[Message] = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": checked_text(given[answer], where, answer)},
    ]
    return Conversation(messages)
