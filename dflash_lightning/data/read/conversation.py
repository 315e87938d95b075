"""From a conversation to ids and a loss mask, by the tokenizer's own chat template and nothing else.

Which text is supervised is said in ``rendering``; here it becomes tokens. A row's ids before a supervised span are, all
of them, the ids that a server would feed the target as the prompt of that response: where tokens would run across the
boundary, prompt and response are tokenised apart, as they are when the target generates.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from dflash_lightning.data.read.foreign_ids import foreign_token
from dflash_lightning.data.read.messages import Message
from dflash_lightning.data.read.rendering import ChatTemplate, Turn
from dflash_lightning.data.read.rows import ChatRow
from dflash_lightning.data.read.template_settings import UnusableRow, check_row_settings, check_template
from dflash_lightning.errors import SettingError

__all__ = ["SUPERVISE", "ChatRenderer", "Encoded", "Rendered", "Supervise", "Turn", "UnusableRow", "check_template"]

Supervise = Literal["all_turns", "last_turn"]
SUPERVISE: tuple[Supervise, ...] = ("all_turns", "last_turn")
_KNOWN_TAILS = 8  # a template has one or two
_KNOWN_SETTINGS = 64  # renderers of rows with settings of their own; thrown away when there are more


@dataclass(frozen=True)
class Rendered:
    """Consecutive turns of one text: every turn's text, up to its end, is how the next turn's prompt begins."""

    turns: tuple[Turn, ...]

    @property
    def text(self) -> str:
        """The whole conversation as text."""
        return self.turns[-1].full


@dataclass(frozen=True)
class Encoded:
    """Ids and which of them are supervised."""

    input_ids: list[int]
    loss_mask: list[bool]


class ChatRenderer:
    """Renders and tokenises conversations with one tokenizer and one set of template settings.

    Args:
        tokenizer: must carry a chat template.
        stop_ids: ids at which the target stops, besides the tokenizer's special tokens.
        chat_template_kwargs: passed to the template, e.g. ``{"enable_thinking": False}``.
        supervise: ``"all_turns"``, or ``"last_turn"`` for the last assistant turn of each conversation only.
        vocab_size: rows of the target's embedding; prompts with a token beyond them are refused. Null knows of none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        stop_ids: Collection[int] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        supervise: str = "all_turns",
        vocab_size: int | None = None,
    ) -> None:
        if supervise not in SUPERVISE:
            raise SettingError("data.supervise", f"{supervise!r} is unknown", allowed=f"Use one of {list(SUPERVISE)}")
        self.template = ChatTemplate(tokenizer, chat_template_kwargs, stop_ids)
        self.tokenizer = self.template.tokenizer
        self.supervise = supervise
        self.vocab_size = vocab_size
        self._stop_ids = stop_ids
        self._of_settings: dict[str, ChatRenderer] = {}
        self._tails: list[tuple[str, list[int]]] = []

    @cached_property
    def _split_ids(self) -> set[int]:
        """Added tokens, special or not: text is split at them before anything else is done to it."""
        return set(self.tokenizer.added_tokens_decoder)

    @property
    def kwargs(self) -> dict[str, Any]:
        """Settings of the template in force."""
        return self.template.kwargs

    def with_settings(self, settings: Mapping[str, Any]) -> ChatRenderer:
        """The renderer of a row with template settings of its own, which stand over those in force.

        Raises:
            UnusableRow: the template reads no such setting.
        """
        more = check_row_settings(self.tokenizer, settings) if settings else {}
        kwargs = {**self.kwargs, **more}
        if kwargs == self.kwargs:
            return self
        key = json.dumps(kwargs, sort_keys=True, default=str)
        if key not in self._of_settings:
            if len(self._of_settings) >= _KNOWN_SETTINGS:
                self._of_settings.clear()
            self._of_settings[key] = ChatRenderer(
                self.tokenizer,
                stop_ids=self._stop_ids,
                chat_template_kwargs=kwargs,
                supervise=self.supervise,
                vocab_size=self.vocab_size,
            )
        return self._of_settings[key]

    # -- text ---------------------------------------------------------------------------------------------------------

    def turns(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None = None,
        *,
        unlearned: Collection[int] = (),
        cut: Collection[int] = (),
    ) -> list[Turn]:
        """The supervised assistant turns, each rendered with the history it would have when served.

        Answers at the places ``unlearned`` are history only; of those at ``cut`` the end is not supervised.
        """
        last_only = self.supervise == "last_turn"
        return self.template.turns(messages, tools, last_only=last_only, unlearned=unlearned, cut=cut)

    def of_row(self, row: ChatRow) -> list[Rendered]:
        """``rendered`` for a row of a file, with its own tools, settings and marks."""
        renderer = self.with_settings(row.chat_template_kwargs)
        return renderer.rendered(row.messages, row.tools, unlearned=row.unlearned, cut=row.cut)

    def rendered(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None = None,
        *,
        unlearned: Collection[int] = (),
        cut: Collection[int] = (),
    ) -> list[Rendered]:
        """One text for the whole conversation, or one per assistant turn where the template rewrites history.

        Templates that strip the thinking of earlier turns, or treat tool turns specially, show a turn differently once
        it is history. Training on that form would teach text the target never generates. What a template writes after
        a turn's end may differ: nobody generates it, and the row holds what stands in the later prompt.
        """
        turns = self.turns(messages, tools, unlearned=unlearned, cut=cut)
        if all(after.prompt.startswith(before.full[: before.end]) for before, after in pairwise(turns)):
            return [Rendered(tuple(turns))]
        return [Rendered((turn,)) for turn in turns]

    # -- ids ----------------------------------------------------------------------------------------------------------

    def encode_prompt(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[int]:
        """Ids that a server would feed the target for this history.

        Raises:
            UnusableRow: the template refuses it, or the target has no embedding row for one of its tokens.
        """
        ids = self._ids(self.template.prompt(messages, tools))
        self._check(ids)
        return ids

    def check_texts(self, messages: Sequence[Message]) -> None:
        """Refuse messages with a token that the target has no row for, before any of them is rendered.

        Raises:
            UnusableRow: names the token.
        """
        for message in messages:
            self._check(self._ids(message["content"]))

    def _check(self, ids: list[int]) -> None:
        foreign = None if self.vocab_size is None else foreign_token(ids, self.vocab_size, self.tokenizer)
        if foreign is not None:
            raise UnusableRow(foreign)

    def encode(self, rendered: Sequence[Rendered]) -> list[list[Encoded] | UnusableRow]:
        """Per text its encoding, or one per turn where tokens run across a boundary, or why it cannot be used."""
        if not rendered:
            return []
        if not self.tokenizer.is_fast:
            return [self._encode_turns(item) for item in rendered]
        batch = self.tokenizer(
            [item.text for item in rendered],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        assert batch.encodings is not None
        results: list[list[Encoded] | UnusableRow] = []
        for item, ids, encoding in zip(rendered, batch["input_ids"], batch.encodings, strict=True):
            mask = self._mask(item, ids, encoding)
            results.append(self._encode_turns(item) if mask is None else [Encoded(ids, mask)])
        return results

    def _mask(self, item: Rendered, ids: list[int], encoding: Encoding) -> list[bool] | None:
        """All turns in one row; null if some served prompt would not be tokenised as it stands in this row."""
        mask = [False] * len(ids)
        for turn in item.turns:
            begin = self._begin(item.text, turn.start, ids, encoding)
            end = None if begin is None else self._end(item.text, turn, ids, encoding)
            if begin is None or end is None:
                return None
            mask[begin:end] = [True] * (end - begin)
        return mask

    def _begin(self, text: str, position: int, ids: list[int], encoding: Encoding) -> int | None:
        """Index of the first token after ``text[:position]``, or null if the prompt alone tokenises differently.

        What stands before an added token has no influence on what follows it, nor the other way round. So the prompt's
        ids are this row's if they are after the last added token of the prompt; that tail is mostly the same text.
        """
        begin = encoding.char_to_token(position)
        if begin is None or _place(encoding, begin) != position:
            return None
        for tail, expected in self._tails:
            first, at = begin - len(expected), position - len(tail)
            if first >= 0 and ids[first:begin] == expected and text.startswith(tail, at):
                return begin if _place(encoding, first) == at else None
        first = next((j for j in range(begin - 1, -1, -1) if ids[j] in self._split_ids), 0)
        tail = text[_place(encoding, first) if first else 0 : position]
        expected = self._ids(tail)
        if ids[first:begin] != expected:
            return None
        if expected and expected[0] in self._split_ids and len(self._tails) < _KNOWN_TAILS:
            self._tails.append((tail, expected))
        return begin

    def _end(self, text: str, turn: Turn, ids: list[int], encoding: Encoding) -> int | None:
        """Index after the last token of the turn; one that runs across its end belongs to it, if the end was said."""
        position = turn.end
        last = encoding.char_to_token(position - 1)
        if last is not None and ids[last] in self.template.stop_ids:
            return last + 1
        if position == len(text):
            return len(ids)
        following = encoding.char_to_token(position)
        if following is None:
            return None
        return following if turn.is_cut or _place(encoding, following) == position else following + 1

    def _encode_turns(self, item: Rendered) -> list[Encoded] | UnusableRow:
        """One row per turn, prompt and response tokenised apart: exactly what serving does."""
        rows = []
        for turn in item.turns:
            prompt, said = self._ids(turn.prompt), self._ids(turn.supervised)
            if self._decode(prompt + said) != self._decode(self._ids(turn.full[: turn.end])):
                return UnusableRow("tokens run across the boundary between prompt and response")
            rows.append(Encoded(prompt + said, [False] * len(prompt) + [True] * len(said)))
        return rows

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _place(encoding: Encoding, token: int) -> int:
    """Where in the text a token begins."""
    span = encoding.token_to_chars(token)
    assert span is not None, "only special tokens that a post-processor adds have no place, and none are added"
    return span[0]
