"""Columns beside a conversation: what changes the text that the model sees is used or refused by name.

Everything else (ids, scores, sources, categories, a nested ``metadata``) is not read. Names count without case and
separators, so that ``systemPrompt`` is ``system_prompt``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_lightning.data.read.marks import finish_reasons, plain, row_is_learned
from dflash_lightning.data.read.messages import REASONING, Conversation, Message
from dflash_lightning.data.read.values import checked_text, from_json_text, is_empty, joined_text, short

_SYSTEM = {
    *("system", "systemprompt", "systemmessage", "systemmsg", "systemtext", "systemcontent", "sysprompt"),
    *("systeminstruction", "systeminstructions", "sys", "sysmsg", "sysmessage", "systemturn", "systemcontext"),
}
_OLD_TOOLS = {"functions", "functiondefinitions", "functiondefs", "functionschemas", "functionlist"}  # without "type"
_TOOLS = {
    *("tools", "tooldefs", "tooldefinitions", "toolschema", "toolschemas", "toolspec", "toolspecs", "toollist"),
    *("toolsjson", "toolslist", "toolsdef", "tooldef", "tooldefinition", "availabletools", "availablefunctions"),
    *_OLD_TOOLS,
}
_OTHER_SCHEMAS = ("input_schema", "inputSchema")  # Anthropic's and MCP's name of a tool's parameters
_SETTINGS = {"chattemplatekwargs", "templatekwargs"}
_SETTING = {
    plain(name): name
    for name in (
        *("enable_thinking", "reasoning_effort", "thinking_budget"),
        *("custom_instructions", "builtin_tools", "python_tools", "xml_tools"),
    )
}
_REASONING = {"reasoning", "reasoningcontent", "thinking", "thought", "thoughts"}
_OF_TOKENS = ("lossmask", "assistantmask", "assistantmasks")  # a value for each of the input_ids
_MEDIA = [f"{kind}{form}" for kind in ("image", "audio", "video") for form in ("", "s", "url", "urls", "path", "paths")]
_HISTORY = (
    *("history", "chathistory", "conversationhistory", "dialoghistory", "dialoguehistory", "messagehistory"),
    *("previousmessages", "previousturns", "priormessages", "pastmessages"),
)
_REFUSED = {
    **dict.fromkeys(_HISTORY, "is not read. Write the whole conversation as 'messages'"),
    **dict.fromkeys([*_MEDIA, "pixelvalues"], "cannot be shown to a text model"),
    "chattemplate": "is not read: every row is rendered with the tokenizer's own template",
    **dict.fromkeys(_OF_TOKENS, 'has no input_ids to belong to. Mark messages instead, with "train": false'),
}
# Texts that are often a copy of what a message says, and otherwise something that the model should have been told.
_COPIES = {
    *("prompt", "instruction", "instructions", "input", "query", "preamble", "preprompt"),
    *("context", "contexts", "document", "documents", "retrieveddocuments", "passage", "passages"),
    *("ragcontext", "retrievedcontext", "retrievedpassages", "knowledge", "metaprompt"),
    *("developer", "developermessage", "developerprompt", "developerinstructions"),
    *("prefill", "assistantprefill", "assistantprefix", "responseprefix"),
    *("docs", "retrieveddocs", "ragdocuments", "searchresults", "knowledgebase", "evidence", "grounding", "snippets"),
    *("fewshot", "fewshots", "fewshotexamples", "examples", "demos", "demonstrations", "shots"),
    *("dialog", "dialogue", "past", "turnhistory", "contextmessages", "prevmessages"),
}
# Names that nobody can list hold one of these words: text of so many words under them is told to the model, or lost.
_SPOKEN = {
    **dict.fromkeys(("system", "persona", "instruct", "guideline"), 2),
    **dict.fromkeys(("prompt", "tool", "context", "document", "passage", "retriev", "history", "fewshot"), 5),
}
OTHER_READINGS = ("prompt", "instruction", "input")  # keys that another kind of row consists of


@dataclass(frozen=True)
class Beside:
    """What the columns beside a conversation say about it.

    ``cut`` says by column whether the last answer was cut off, or which of all answers were.
    """

    where: str
    system: str | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    reasoning: str | None = None
    learned: bool = True
    cut: dict[str, list[bool]] = field(default_factory=dict)

    def apply(self, conversation: Conversation) -> Conversation:
        """The conversation with the system text in front and the reasoning in its only answer.

        Raises:
            ValueError: it has a system turn that says something else, or there are several answers.
        """
        messages, unlearned, cut = list(conversation.messages), set(conversation.unlearned), set(conversation.cut)
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if self.reasoning is not None and answers:
            messages = _with_reasoning(messages, answers, self.reasoning, self.where)
        for key, reasons in self.cut.items():
            if len(reasons) not in (1, len(answers)):
                raise ValueError(
                    f"{self.where}: {key!r} has {len(reasons)} reasons, but the conversation has {len(answers)} "
                    "answers. Give one, for the last answer, or one for each."
                )
            cut.update(place for place, is_cut in zip(reversed(answers), reversed(reasons), strict=False) if is_cut)
        if not self.learned:
            unlearned.update(answers)
        if self.system is None or _says(messages, self.system, self.where):
            return Conversation(messages, frozenset(unlearned), frozenset(cut))
        messages.insert(0, {"role": "system", "content": self.system})
        return Conversation(messages, frozenset(p + 1 for p in unlearned), frozenset(p + 1 for p in cut))


def read_beside(given: Mapping[str, Any], where: str, own: Collection[str]) -> Beside:
    """What a record's columns say beside its conversation; ``own`` are the keys that the conversation itself is in.

    Raises:
        ValueError: a column that would change what the model sees cannot be used, or two of them differ.
    """
    named = [(key, plain(key), value) for key, value in given.items() if key not in own and not is_empty(value)]
    if "input_ids" in given:
        named = [(key, name, value) for key, name, value in named if name not in _OF_TOKENS]
    for key, name, value in named:
        if name in _REFUSED:
            raise _refused(where, key, _REFUSED[name])
        if name not in _TOOLS and _holds_schemas(value):
            raise _refused(where, key, "holds function schemas, which the model would not see. Call it 'tools'")
        if name == "toolchoice" and value != "auto":
            raise _refused(where, key, f"is {short(value)}, which changes what is served. Only 'auto' is supported")
    systems = {key: joined_text(value, where, key) for key, name, value in named if name in _SYSTEM}
    tools = {key: _tools(value, where, key, name in _OLD_TOOLS) for key, name, value in named if name in _TOOLS}
    thoughts = {key: _reasoning(value, where, key) for key, name, value in named if name in _REASONING}
    return Beside(
        where,
        _agreed(systems, where),
        _agreed(tools, where),
        _settings(named, where),
        _agreed(thoughts, where),
        row_is_learned({key: value for key, _, value in named}, where),
        finish_reasons({key: value for key, _, value in named}),
    )


def check_copies(given: Mapping[str, Any], where: str, own: Collection[str], messages: Sequence[Message]) -> None:
    """Refuse an instruction, context or the like beside the conversation that no message repeats.

    Raises:
        ValueError: the model would be asked without it.
    """
    for key, value in given.items():
        if key in own or is_empty(value) or not _is_said(plain(key), value):
            continue
        texts = list(_texts(value))
        if not texts or not all(any(text.strip() in m["content"] for m in messages) for text in texts):
            raise _refused(where, key, "stands in no message, so the model would not see it. Write it into one")


def _is_said(name: str, value: Any) -> bool:
    """Whether a column may hold what the model should have been told."""
    if name in _COPIES:
        return True
    if any(name in names for names in (_SYSTEM, _TOOLS, _SETTINGS, _SETTING, _REASONING)):
        return False  # used, where it is
    fewest = min((words for part, words in _SPOKEN.items() if part in name), default=None)
    return fewest is not None and any(len(text.split()) >= fewest for text in _texts(value))


def _texts(value: Any) -> Iterator[str]:
    """The texts of a text, of a list of them, and of messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, dict):
        for key in ("content", "value", "text"):
            yield from _texts(value.get(key))


def _refused(where: str, key: str, why: str) -> ValueError:
    return ValueError(f"{where}: {key!r} {why}; or leave the column out (in data.train: ignore: [{key}]).")


def _agreed(found: Mapping[str, Any], where: str) -> Any:
    """The one value under all spellings; null where there is none."""
    values = list(found.values())
    if any(value != values[0] for value in values):
        raise ValueError(f"{where}: {' and '.join(map(repr, found))} differ. Remove all but one of them.")
    return values[0] if values else None


def _says(messages: Sequence[Message], system: str, where: str) -> bool:
    """Whether the conversation begins with this system text already, alone or with more around it."""
    own = [message["content"] for message in messages if message["role"] in ("system", "developer")]
    if own and (system.strip() not in own[0] or messages[0]["role"] not in ("system", "developer")):
        raise ValueError(
            f"{where}: the column says {short(system)}, and the conversation's own system turn {short(own[0])}. "
            "Remove one of them."
        )
    return bool(own)


def _with_reasoning(messages: list[Message], answers: list[int], reasoning: str, where: str) -> list[Message]:
    """The only answer gets the reasoning, unless it stands there already."""
    shown = [str(messages[i].get(name) or "") for i in answers for name in ("content", *REASONING)]
    if any(reasoning.strip() in text for text in shown):
        return messages
    last = messages[answers[-1]]
    if len(answers) > 1 or "</think>" in last["content"] or any(last.get(name) for name in REASONING):
        raise ValueError(
            f"{where}: the reasoning beside the conversation is of no single answer, or differs from the answer's own. "
            "Write it into the message as 'reasoning_content'."
        )
    return [*messages[: answers[-1]], {**last, "reasoning_content": reasoning}, *messages[answers[-1] + 1 :]]


def _reasoning(value: Any, where: str, key: str) -> str:
    """Text of a reasoning column; a switch is no text."""
    if not isinstance(value, str) or plain(value) in ("on", "off", "true", "false", "yes", "no"):
        raise _refused(
            where, key, f"is {short(value)}, no text. A switch belongs into chat_template_kwargs or the system text"
        )
    return checked_text(value, where, key)


# -- tools and settings -----------------------------------------------------------------------------------------------


def _tools(value: Any, where: str, key: str, is_old: bool) -> list[Any] | None:
    """Function schemas as a list of objects; a list may be JSON text, and so may its entries."""
    found = from_json_text(value)
    tools = [from_json_text(tool) for tool in (found if isinstance(found, list) else [found])]
    if not all(isinstance(tool, dict) and ("name" in tool or "function" in tool or "type" in tool) for tool in tools):
        raise ValueError(
            f"{where}: {key!r} must be a list of function schemas (or JSON text of one), not {short(value)}; or leave "
            f"the column out (in data.train: ignore: [{key}])."
        )
    for tool in tools:
        if form := next((name for name in _OTHER_SCHEMAS if name in tool), None):
            raise ValueError(
                f"{where}: {key!r} holds a schema with {form!r}, a form that chat templates do not read. Write it as "
                '{"type": "function", "function": {"name": .., "description": .., "parameters": ..}}.'
            )
    return [tool if "function" in tool or not is_old else {"type": "function", "function": tool} for tool in tools]


def _holds_schemas(value: Any) -> bool:
    """Whether a value can only be function schemas, whatever its column is called."""
    found = from_json_text(value) if isinstance(value, str) else value
    tools = [from_json_text(tool) for tool in (found if isinstance(found, list) else [found])]
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, dict)]
    return bool(tools) and len(functions) == len(tools) and all(map(_is_schema, functions, tools))


def _is_schema(function: Any, tool: dict[str, Any]) -> bool:
    """Whether ``function``, which ``tool`` is or holds, describes a function; a call of one has arguments instead."""
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    is_described = function is not tool and "description" in function and "arguments" not in function
    return is_described or any(isinstance(function.get(name), dict) for name in ("parameters", *_OTHER_SCHEMAS))


def _settings(named: Iterable[tuple[str, str, Any]], where: str) -> dict[str, Any]:
    """Settings of the chat template that hold for this row only."""
    found: dict[str, Any] = {}
    for key, name, value in named:
        if name not in _SETTINGS and name not in _SETTING:
            continue
        more = {_SETTING[name]: value} if name in _SETTING else from_json_text(value)
        if not isinstance(more, dict):
            raise ValueError(f"{where}: {key!r} must be an object, such as {{'enable_thinking': false}}.")
        for setting, wanted in more.items():
            if wanted is not None and found.setdefault(setting, wanted) != wanted:
                raise ValueError(f"{where}: {key!r} and another column differ in {setting!r}. Remove one.")
    return found
