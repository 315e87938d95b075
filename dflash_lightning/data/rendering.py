"""A conversation as the tokenizer's own chat template writes it, and which part of that text the target would write.

The supervised span of an assistant turn begins where ``render(history + turn)`` extends ``render(history,
add_generation_prompt=True)``: everything after it is what the target has to generate when it is served. Regular
expressions over roles, generation markers and substitute templates are not used: each of them has given silently wrong
or empty masks somewhere. The template may be anything; what it does is looked at for every row anew.

Marker text inside a message (``<|im_end|>`` written by a user) stays what a server makes of it, the special token. It
is part of its message and never decides where a span begins or ends.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from jinja2 import Environment, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from dflash_lightning.data.rows import Message
from dflash_lightning.target.mask_token import special_ids

# Names under which messages carry reasoning; transformers passes each to the template under the name that it reads.
REASONING = ("reasoning_content", "thinking", "reasoning")
_THINK_TAG = re.compile(r"</?think>")
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")  # transformers' own; says nothing here
# What templates raise on messages they do not foresee: a field that is missing, null or of another kind.
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
_FUNCTIONS = {"raise_exception", "strftime_now"}  # given to templates by transformers
_PROBE = "_probe_"
T = TypeVar("T")

NO_TURN = "no assistant turn"
NO_PROMPT = "no assistant turn with a message before it"
NOT_EXTENDED = "rendering with the assistant turn does not extend the generation prompt"
NOT_SHOWN = "the chat template leaves out part of an assistant turn (content, reasoning or tool calls)"
NO_TOOLS = "the chat template does not show the row's tools"


class UnusableRow(Exception):
    """A conversation that this template cannot turn into honest training data; the text is the reason to count."""


@dataclass(frozen=True)
class Turn:
    """One assistant turn, rendered: ``full`` starts with ``prompt``, and the target generates ``full[start:end]``.

    The end-of-turn at which the target stops is inside; what the template writes after it (a newline, say) is not.
    """

    prompt: str
    full: str
    end: int

    @property
    def start(self) -> int:
        return len(self.prompt)

    @property
    def supervised(self) -> str:
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
        except _TEMPLATE_ERRORS as error:
            raise UnusableRow(f"the chat template refuses it ({error})") from None
        assert isinstance(texts, list)
        return list(texts)

    def prompt(self, messages: Sequence[Message], tools: list[Any] | None) -> str:
        """The text that a server would feed the target for this history."""
        if not messages:
            raise UnusableRow("there is no message to respond to")
        return self._first_accepted(messages, lambda spelled: self.render([spelled], tools, generation_prompt=True))[0]

    def turns(self, messages: Sequence[Message], tools: list[Any] | None, *, last_only: bool) -> list[Turn]:
        """The assistant turns (or the last one), each with the history it would have when served.

        A conversation's very first message is no response to anything: it is history, and never supervised.
        """
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not places:
            raise UnusableRow(NO_TURN)
        places = [i for i in places if i][-1 if last_only else 0 :]
        if not places:
            raise UnusableRow(NO_PROMPT)
        return self._first_accepted(messages, lambda spelled: self._turns(spelled, tools, places))

    def _first_accepted(self, messages: Sequence[Message], use: Callable[[Sequence[Message]], T]) -> T:
        """What ``use`` makes of the messages, in the first spelling of their tool calls that the template can show."""
        spellings: list[Sequence[Message]] = [messages]
        if any(message.get("tool_calls") for message in messages):
            spellings.insert(0, with_parsed_arguments(messages))
        reasons = []
        for spelled in spellings:
            try:
                return use(spelled)
            except UnusableRow as reason:
                reasons.append(reason)
        raise reasons[0]

    def _turns(self, messages: Sequence[Message], tools: list[Any] | None, places: list[int]) -> list[Turn]:
        prompts = self.render([messages[:i] for i in places], tools, generation_prompt=True)
        fulls = self.render([messages[: i + 1] for i in places], tools, generation_prompt=False)
        if tools and not all(name in prompt for name in _names(tools) for prompt in prompts):
            raise UnusableRow(NO_TOOLS)
        return [self._turn(p, full, messages[i]) for p, full, i in zip(prompts, fulls, places, strict=True)]

    def _turn(self, prompt: str, full: str, message: Message) -> Turn:
        if not full.startswith(prompt):
            raise UnusableRow(NOT_EXTENDED)
        shown = end_of_shown(message, full, len(prompt))
        return Turn(prompt, full, self._end(full, len(prompt), shown))

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
        try:
            (text,) = self.render([probe], None, generation_prompt=False)
        except UnusableRow:
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


def with_parsed_arguments(messages: Sequence[Message]) -> list[Message]:
    """The messages with every tool call's arguments as an object where they are JSON text, as servers hand them over.

    OpenAI's format has a text, most templates write ``arguments | tojson``, which would quote it once more.
    """
    return [
        {**message, "tool_calls": [_parsed_call(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _parsed_call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _parsed_call(call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        value = json.loads(arguments)
    except json.JSONDecodeError:
        return call
    return {**call, "arguments": value} if isinstance(value, dict) else call


# -- settings ---------------------------------------------------------------------------------------------------------


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
    if not kwargs:
        return tokenizer
    if taken := [key for key in kwargs if key in _ARGUMENTS]:
        raise ValueError(
            f"data.chat_template_kwargs: {taken} is set row by row, not for all of them. Remove it; tools belong to a "
            "row's 'tools'."
        )
    read = template_variables(tokenizer)
    if unread := [key for key in kwargs if key not in read]:
        others = sorted(read - {"messages", "tools", "add_generation_prompt", *tokenizer.special_tokens_map})
        raise ValueError(
            f"data.chat_template_kwargs: {unread} is never read by the chat template of {name!r}. "
            f"Correct the spelling or remove it; what it reads: {others or 'no setting at all'}."
        )
    return tokenizer


_ARGUMENTS = {"messages"} | inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()


def template_variables(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Names that the chat template (or any of several) takes from outside.

    Raises:
        ValueError: it is no valid template.
    """
    template: Any = tokenizer.chat_template
    found: set[str] = set()
    for text in template.values() if isinstance(template, dict) else [template]:
        try:
            tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION_TAG.sub("", text))
        except TemplateSyntaxError as error:
            raise ValueError(
                f"data: the chat template of {tokenizer.name_or_path!r} is not valid ({error.message}, line "
                f"{error.lineno}). Correct tokenizer.chat_template."
            ) from None
        found |= meta.find_undeclared_variables(tree) - _own_names(tree) - _FUNCTIONS
    return found


def _own_names(tree: nodes.Template) -> set[str]:
    """Names that the template gives values itself, whatever they held: set in one branch, they look taken in another.

    A name that is set from itself (``x | default(1)``) or where ``x is defined`` was asked is a setting with a default.
    """
    own: set[str] = set()
    for assignment in tree.find_all(nodes.Assign):
        target, value = ({n.name for n in _with_children(part)} for part in (assignment.target, assignment.node))
        own |= target - value
    asked = [test.node for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined")]
    return own - {node.name for node in asked if isinstance(node, nodes.Name)}


def _with_children(node: nodes.Node) -> list[nodes.Name]:
    return [*([node] if isinstance(node, nodes.Name) else []), *node.find_all(nodes.Name)]
