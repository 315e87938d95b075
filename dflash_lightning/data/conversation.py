"""From a conversation to ids and a loss mask, by the tokenizer's own chat template and nothing else.

The supervised span of an assistant turn is where ``render(history + turn)`` extends ``render(history,
add_generation_prompt=True)``: exactly what the target would have to generate when it is served. Regular expressions,
generation markers and substitute templates are not used: each of them has given silently wrong or empty masks
somewhere.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from dflash_lightning.data.rows import Message
from dflash_lightning.target.mask_token import special_ids

Supervise = Literal["all_turns", "last_turn"]
SUPERVISE: tuple[Supervise, ...] = ("all_turns", "last_turn")
_EMPTY_REASONING = re.compile(r"\s*<think>\s*</think>")


class UnusableRow(Exception):
    """A conversation that this template cannot turn into honest training data; the text is the reason to count."""


@dataclass(frozen=True)
class Turn:
    """One assistant turn, rendered: the text ``full`` starts with ``prompt``; the rest is what the target generates."""

    prompt: str
    full: str
    content: str

    @property
    def start(self) -> int:
        return len(self.prompt)

    @property
    def completion(self) -> str:
        return self.full[self.start :]

    @property
    def has_empty_reasoning(self) -> bool:
        """The template put an empty think block in front of the answer, which the target would have to produce."""
        return _EMPTY_REASONING.match(self.completion) is not None


@dataclass(frozen=True)
class Rendered:
    """Consecutive turns of one text: every turn's ``full`` is how the next turn's ``prompt`` begins."""

    turns: tuple[Turn, ...]

    @property
    def text(self) -> str:
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
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        stop_ids: Collection[int] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        supervise: str = "all_turns",
    ) -> None:
        if supervise not in SUPERVISE:
            raise ValueError(f"data.supervise: {supervise!r} is unknown. Use one of {list(SUPERVISE)}.")
        self.tokenizer = check_template(tokenizer, chat_template_kwargs)
        self.kwargs = dict(chat_template_kwargs or {})
        self.supervise = supervise
        self.split_ids = special_ids(self.tokenizer)
        self.stop_ids = self.split_ids | set(stop_ids)
        self._tails: dict[str, list[int]] = {}

    # -- text ---------------------------------------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], *, tools: list[Any] | None = None, generation_prompt: bool) -> str:
        """The template's text; raises ``UnusableRow`` with the template's own complaint."""
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=generation_prompt, **self.kwargs
            )
        except (TemplateError, TypeError) as error:  # TypeError: a template that joins text with a missing field
            raise UnusableRow(f"the chat template refuses it ({error})") from None
        assert isinstance(text, str)
        return text

    def turns(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[Turn]:
        """The supervised assistant turns, each rendered with the history it would have when served."""
        ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not ends:
            raise UnusableRow("no assistant turn")
        turns = []
        for i in ends if self.supervise == "all_turns" else ends[-1:]:
            prompt = self.render(messages[:i], tools=tools, generation_prompt=True)
            full = self.render(messages[: i + 1], tools=tools, generation_prompt=False)
            if not full.startswith(prompt):
                raise UnusableRow("rendering with the assistant turn does not extend the generation prompt")
            turns.append(Turn(prompt, full, messages[i]["content"]))
        return turns

    def rendered(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[Rendered]:
        """One text for the whole conversation, or one per assistant turn where the template rewrites history.

        Templates that strip the thinking of earlier turns, or treat tool turns specially, show a turn differently once
        it is history. Training on that form would teach text the target never generates.
        """
        turns = self.turns(messages, tools)
        if all(after.prompt.startswith(before.full) for before, after in pairwise(turns)):
            return [Rendered(tuple(turns))]
        return [Rendered((turn,)) for turn in turns]

    # -- ids ----------------------------------------------------------------------------------------------------------

    def encode_prompt(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[int]:
        """Ids that a server would feed the target for this history."""
        return self._ids(self.render(messages, tools=tools, generation_prompt=True))

    def encode(self, rendered: Sequence[Rendered]) -> list[list[Encoded] | UnusableRow]:
        """Per text its encoding, or one per turn where tokens run across a boundary, or why it cannot be used."""
        if not rendered:
            return []
        if not self.tokenizer.is_fast:
            return [self._encode_turns(item) for item in rendered]
        encoding = self.tokenizer(
            [item.text for item in rendered],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        results: list[list[Encoded] | UnusableRow] = []
        for item, ids, offsets in zip(rendered, encoding["input_ids"], encoding["offset_mapping"], strict=True):
            whole = self._encode_whole(item, ids, offsets)
            results.append([whole] if whole is not None else self._encode_turns(item))
        return results

    def _encode_whole(self, item: Rendered, ids: list[int], offsets: list[tuple[int, int]]) -> Encoded | None:
        """All turns in one row; null if some served prompt would not be tokenised as it stands in this row."""
        starts = [offset[0] for offset in offsets]
        specials = [j for j, token in enumerate(ids) if token in self.split_ids]
        mask = [False] * len(ids)
        for turn in item.turns:
            begin = self._boundary(item.text, ids, starts, specials, turn.start)
            if begin is None:
                return None
            stop = bisect_left(starts, len(turn.full), lo=begin)
            end = self._turn_end(turn, ids, offsets, begin, stop)
            mask[begin:end] = [True] * (end - begin)
        return Encoded(ids, mask)

    def _boundary(self, text: str, ids: list[int], starts: list[int], specials: list[int], position: int) -> int | None:
        """Index of the first token after ``text[:position]``, or null if the prompt alone tokenises differently.

        Tokenizers split at special tokens first, so it is enough to tokenise again what follows the last one of them.
        """
        after = bisect_left(starts, position)
        last = bisect_left(specials, after) - 1
        first = specials[last] if last >= 0 else 0
        tail = text[starts[first] if last >= 0 else 0 : position]
        expected = self._tail_ids(tail)
        begin = first + len(expected)
        if ids[first:begin] != expected or (begin < len(ids) and starts[begin] < position):
            return None
        return begin

    def _turn_end(self, turn: Turn, ids: list[int], offsets: list[tuple[int, int]], begin: int, stop: int) -> int:
        """End (exclusive) of the supervised tokens: just after the end-of-turn token, where the target stops.

        That is the first special token of the run of special tokens and white space which closes the turn: Gemma's and
        ChatML's newline after it is template text that nobody generates. Special tokens inside the content are content.
        An empty response may be preceded by special tokens of a header, so there the last one of the run ends the turn.
        A template without such a token ends the turn with the content.
        """
        content = turn.content.strip()
        found = turn.full.find(content, turn.start)
        content_end = found + len(content) if found >= 0 else turn.start
        closing, j = [], stop
        while j > begin and offsets[j - 1][0] >= content_end:
            if ids[j - 1] in self.stop_ids:
                closing.append(j)
            elif turn.full[offsets[j - 1][0] : offsets[j - 1][1]].strip():
                break
            j -= 1
        if closing:
            return closing[-1] if content else closing[0]
        found = turn.full.rfind(content, turn.start)
        last = found + len(content) if found >= 0 else len(turn.full.rstrip())
        return bisect_left([offset[0] for offset in offsets[:stop]], last, lo=begin)

    def _encode_turns(self, item: Rendered) -> list[Encoded] | UnusableRow:
        """One row per turn, prompt and completion tokenised apart: exactly what serving does."""
        rows = []
        for turn in item.turns:
            prompt, completion = self._ids(turn.prompt), self._ids(turn.completion)
            text = self.tokenizer.decode(
                prompt + completion, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            if text != turn.full:
                return UnusableRow("tokens run across the boundary between prompt and response")
            end = self._piece_end(turn, completion)
            ids = prompt + completion
            rows.append(Encoded(ids, [len(prompt) <= j < len(prompt) + end for j in range(len(ids))]))
        return rows

    def _piece_end(self, turn: Turn, completion: list[int]) -> int:
        """``_turn_end`` for a completion tokenised alone; decoding gives the offsets that slow tokenizers lack."""
        if self.tokenizer.is_fast:
            encoding = self.tokenizer(turn.completion, add_special_tokens=False, return_offsets_mapping=True)
            offsets = [(turn.start + a, turn.start + b) for a, b in encoding["offset_mapping"]]
            return self._turn_end(turn, completion, offsets, 0, len(completion))
        texts = [self._decode(completion[:j]) for j in range(len(completion) + 1)]
        offsets = [(turn.start + len(a), turn.start + len(b)) for a, b in pairwise(texts)]
        return self._turn_end(turn, completion, offsets, 0, len(completion))

    def _decode(self, ids: list[int]) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text).rstrip("\ufffd")  # a token may end in the middle of a character

    def _tail_ids(self, tail: str) -> list[int]:
        if tail not in self._tails:
            if len(self._tails) > 4096:
                self._tails.clear()
            self._tails[tail] = self._ids(tail)
        return self._tails[tail]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def check_template(
    tokenizer: PreTrainedTokenizerBase | None, kwargs: Mapping[str, Any] | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer, once it is known to have a chat template that reads every key of ``kwargs``."""
    if tokenizer is None:
        raise ValueError(
            "data: chat rows need a tokenizer, and this target has none. Use a target with a tokenizer, or rows with "
            "'input_ids' and 'loss_mask'."
        )
    name = tokenizer.name_or_path or type(tokenizer).__name__
    if tokenizer.chat_template is None:
        raise ValueError(
            f"data: the tokenizer {name!r} has no chat template, so it is not known how a conversation is served. "
            "Use the instruct model's tokenizer, set tokenizer.chat_template, or give rows with 'input_ids' and "
            "'loss_mask'."
        )
    template = str(tokenizer.chat_template)
    unread = [key for key in kwargs or {} if key not in template]
    if unread:
        raise ValueError(
            f"data.chat_template_kwargs: {unread} is never read by the chat template of {name!r}. "
            "Correct the spelling or remove it."
        )
    return tokenizer
