"""A conversation as the tokenizer's own chat template writes it, and which part of that text the target would write.

The supervised span of an assistant turn begins where ``render(history + turn)`` extends ``render(history,
add_generation_prompt=True)``: everything after it is what the target has to generate when it is served. Regular
expressions over roles, generation markers and substitute templates are not used: each of them has given silently wrong
or empty masks somewhere. The template may be anything; what it does is looked at for every row anew.

Marker text inside a message (``<|im_end|>`` written by a user) stays what a server makes of it, the special token. It
is part of its message and never decides where a span begins or ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from dflash_lightning.data.read.messages import REASONING, Message
from dflash_lightning.data.read.template_settings import UnusableRow, check_template
from dflash_lightning.data.read.tool_calls import PROBES, prints_objects, spellings
from dflash_lightning.data.read.values import from_json_text
from dflash_lightning.target.mask_token import special_ids
from dflash_lightning.target.turn_end import TEMPLATE_ERRORS

_THINK_TAG = re.compile(r"</?think>")
_PROBE = "_probe_"
T = TypeVar("T")

NO_TURN = "no assistant turn"
NO_PROMPT = "no assistant turn with a message before it"
NOT_EXTENDED = "rendering with the assistant turn does not extend the generation prompt"
NOT_SHOWN = "the chat template leaves out part of an assistant turn (content, reasoning or tool calls)"
NO_TOOLS = "the chat template does not show the row's tools"
NOT_LEARNED = "the answers to learn are marked as not to be trained on"


@dataclass(frozen=True)
class Turn:
    """One assistant turn, rendered: ``full`` starts with ``prompt``, and the target generates ``full[start:end]``.

    The end-of-turn at which the target stops is inside; what the template writes after it (a newline, say) is not. Of
    an answer that a limit cut off (``is_cut``) the text alone is inside: the target did not stop there.
    """

    prompt: str
    full: str
    end: int
    is_cut: bool = False

    @property
    def start(self) -> int:
        """The character at which the answer begins."""
        return len(self.prompt)

    @property
    def supervised(self) -> str:
        """The characters that are learnt."""
        return self.full[self.start : self.end]

    @property
    def has_empty_reasoning(self) -> bool:
        """An empty think block stands in front of the answer, and the target would have to produce (the rest of) it."""
        opened = self.prompt.rstrip().endswith("<think>")
        return re.match(r"\s*</think>" if opened else r"\s*<think>\s*</think>", self.supervised) is not None


class ChatTemplate:
    """A tokenizer's chat template with one set of settings.

    Args:
        tokenizer: must carry a chat template.
        kwargs: passed to the template, e.g. ``{"enable_thinking": False}``.
        stop_ids: ids at which the target stops, besides the tokenizer's special tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        kwargs: Mapping[str, Any] | None = None,
        stop_ids: Collection[int] = (),
    ) -> None:
        self.tokenizer = check_template(tokenizer, kwargs)
        self.kwargs = dict(kwargs or {})
        self._stop_ids = set(stop_ids)

    def render(
        self, conversations: Sequence[Sequence[Message]], tools: list[Any] | None, *, generation_prompt: bool
    ) -> list[str]:
        """The template's texts; raises ``UnusableRow`` with the template's own complaint."""
        try:
            texts: Any = self.tokenizer.apply_chat_template(
                [list(messages) for messages in conversations],
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.kwargs,
            )
        except TEMPLATE_ERRORS as error:
            raise UnusableRow(f"the chat template refuses it ({error})") from None
        assert isinstance(texts, list)
        return list(texts)

    def prompt(self, messages: Sequence[Message], tools: list[Any] | None) -> str:
        """The text that a server would feed the target for this history."""
        if not messages:
            raise UnusableRow("there is no message to respond to")

        def prompt(spelled: Sequence[Message]) -> str:
            (text,) = self.render([spelled], tools, generation_prompt=True)
            _check_shown(tools, spelled, [text])
            return text

        return self._first_accepted(messages, prompt)

    def turns(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None,
        *,
        last_only: bool,
        unlearned: Collection[int] = (),
        cut: Collection[int] = (),
    ) -> list[Turn]:
        """The assistant turns (or the last one), each with the history it would have when served.

        A conversation's very first message is no response to anything: it is history, and never supervised. So are the
        messages at the places ``unlearned``; the end of those at ``cut`` is not the target's.
        """
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not places:
            raise UnusableRow(NO_TURN)
        places = [i for i in places if i][-1 if last_only else 0 :]
        if not places:
            raise UnusableRow(NO_PROMPT)
        places = [i for i in places if i not in unlearned]
        if not places:
            raise UnusableRow(NOT_LEARNED)
        return self._first_accepted(messages, lambda spelled: self._turns(spelled, tools, places, cut))

    def _first_accepted(self, messages: Sequence[Message], use: Callable[[Sequence[Message]], T]) -> T:
        """What ``use`` makes of the messages, in the first spelling of their tool calls that the template can show."""
        if not any(message.get("tool_calls") for message in messages):
            return use(messages)
        reasons = []
        for spelled in spellings(messages, as_text=self._prints_objects):
            try:
                return use(spelled)
            except UnusableRow as reason:
                reasons.append(reason)
        raise reasons[0]

    def _turns(
        self, messages: Sequence[Message], tools: list[Any] | None, places: list[int], cut: Collection[int]
    ) -> list[Turn]:
        prompts = self.render([messages[:i] for i in places], tools, generation_prompt=True)
        fulls = self.render([messages[: i + 1] for i in places], tools, generation_prompt=False)
        _check_shown(tools, messages[: places[0]], prompts)
        return [self._turn(p, full, messages[i], i in cut) for p, full, i in zip(prompts, fulls, places, strict=True)]

    def _turn(self, prompt: str, full: str, message: Message, is_cut: bool) -> Turn:
        if not full.startswith(prompt):
            raise UnusableRow(NOT_EXTENDED)
        shown = end_of_shown(message, full, len(prompt))
        return Turn(prompt, full, shown if is_cut else self._end(full, len(prompt), shown), is_cut)

    @cached_property
    def _prints_objects(self) -> bool:
        return any(prints_objects(text) for probe in PROBES if (text := self._try(probe)) is not None)

    def _try(self, messages: Sequence[Message]) -> str | None:
        """The template's text of a conversation; null where it refuses it."""
        try:
            return self.render([messages], None, generation_prompt=False)[0]
        except UnusableRow:
            return None

    # -- where a turn ends --------------------------------------------------------------------------------------------

    @cached_property
    def stop_ids(self) -> set[int]:
        """Every id at which the target may stop, special tokens included; found when needed: prompts need none."""
        return special_ids(self.tokenizer) | self._stop_ids

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return self._any_of(self.stop_ids)

    @cached_property
    def _stop(self) -> re.Pattern[str]:
        return self._any_of(self._stop_ids)

    @cached_property
    def _closing_run(self) -> re.Pattern[str]:
        return re.compile(rf"(?:\s|{self._special.pattern})+\Z")

    def _any_of(self, ids: set[int]) -> re.Pattern[str]:
        texts = [str(token) for token in self.tokenizer.convert_ids_to_tokens(sorted(ids)) if token]
        return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or r"(?!)")

    @cached_property
    def _closing(self) -> tuple[str, int] | None:
        """What the template writes after a response, and how much of it the target writes; null if it shows none.

        The target's part reaches up to the first token at which it stops, or where none of those is there, up to the
        first special token: ChatML's and Gemma's newline after it is text that nobody generates. A template without
        such a token has an empty part.
        """
        probe = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}]
        text = self._try(probe)
        if text is None:
            return None
        _, found, closing = text.rpartition(_PROBE)
        stop = self._stop.search(closing) or self._special.search(closing)
        return (closing, stop.end() if stop else 0) if found else None

    def _end(self, full: str, start: int, shown: int) -> int:
        """Where the target's part of ``full`` ends; ``shown`` is where the message's own text ends at the earliest."""
        closing, length = self._closing or ("", 0)
        if length and full.endswith(closing) and shown <= len(full) - len(closing):
            return len(full) - len(closing) + length
        # A turn that closes in another way than plain responses do, such as a tool call: the stop token in the run of
        # special tokens and white space at its end.
        run = self._closing_run.search(full, shown)
        if run and (stop := self._stop.search(full, run.start())):
            return stop.end()
        specials = [special.end() for special in self._special.finditer(full, run.start())] if run else []
        if specials:
            return specials[0] if shown > start else specials[-1]  # those of a header may precede an empty response
        return max(start, len(full.removesuffix(closing).rstrip()))


def end_of_shown(message: Message, full: str, start: int) -> int:
    """Where the last of the turn's own texts ends in ``full``, at the earliest: reasoning, content, names of tools.

    Raises:
        UnusableRow: one of them is not there, in this order: the template would teach another turn than the row holds.
    """
    parts = [next((str(message[name]) for name in REASONING if message.get(name)), "")]
    parts += _THINK_TAG.split(message.get("content") or "")
    parts += _names(message.get("tool_calls") or [])
    for part in map(str.strip, parts):
        if part:
            found = full.find(part, start)
            if found < 0:
                raise UnusableRow(NOT_SHOWN)
            start = found + len(part)
    return start


def _names(tools: Sequence[Any]) -> list[str]:
    """Names of tools, or of tool calls: ``{"function": {"name": ..}}`` or flat ``{"name": ..}``."""
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, dict)]
    return [str(function["name"]) for function in functions if isinstance(function, dict) and "name" in function]


def _check_shown(tools: list[Any] | None, messages: Sequence[Message], prompts: Sequence[str]) -> None:
    """Refuse tools, of the row or of a message, that some prompt does not name: the target would not know of them."""
    names = _names(tools or [])
    for message in messages:
        for key in ("tools", "functions"):
            own = from_json_text(message.get(key))
            names += _names(own) if isinstance(own, list) else []
    if not all(name in prompt for name in names for prompt in prompts):
        raise UnusableRow(NO_TOOLS)
