"""Settings of a chat template: which ones it reads, and what to say of those that it does not."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta, nodes
from transformers import PreTrainedTokenizerBase

from dflash_lightning.data.read.values import is_empty
from dflash_lightning.errors import SettingError

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")  # transformers' own; says nothing here
_FUNCTIONS = {"raise_exception", "strftime_now"}  # given to templates by transformers
_ARGUMENTS = {"messages"} | inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()


class UnusableRow(Exception):
    """A conversation that this template cannot turn into honest training data; the text is the reason to count."""


def check_template(
    tokenizer: PreTrainedTokenizerBase | None, kwargs: Mapping[str, Any] | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer, once it is known to have a chat template that reads every key of ``kwargs``."""
    if tokenizer is None:
        raise SettingError(
            "data",
            "chat rows need a tokenizer, and this target has none",
            do="Use a target with a tokenizer, or rows with 'input_ids' and 'loss_mask'",
        )
    name = tokenizer.name_or_path or type(tokenizer).__name__
    if tokenizer.chat_template is None:
        raise SettingError(
            "data",
            f"the tokenizer {name!r} has no chat template, so it is not known how a conversation is served",
            do="Use the instruct model's tokenizer, set tokenizer.chat_template, or give rows with 'input_ids' and "
            "'loss_mask'",
        )
    if not kwargs:
        return tokenizer
    if taken := [key for key in kwargs if key in _ARGUMENTS]:
        raise SettingError(
            "data.chat_template_kwargs",
            f"{taken} is set row by row, not for all of them",
            do="Remove it; tools belong to a row's 'tools'",
        )
    read = template_variables(tokenizer)
    if unread := [key for key in kwargs if key not in read]:
        others = sorted(read - {"messages", "tools", "add_generation_prompt", *tokenizer.special_tokens_map})
        raise SettingError(
            "data.chat_template_kwargs",
            f"{unread} is never read by the chat template of {name!r}",
            do=f"Correct the spelling or remove it; what it reads: {others or 'no setting at all'}",
        )
    return tokenizer


def check_row_settings(tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A row's own settings of the template; those that say nothing to a template that does not read them are left out.

    Raises:
        UnusableRow: a setting is never read, so that the row would be rendered otherwise than it asks for.
    """
    if taken := [key for key in settings if key in _ARGUMENTS]:
        raise UnusableRow(f"the row's chat_template_kwargs hold {taken}, which are no settings of a template")
    read = template_variables(tokenizer)
    used = {key: value for key, value in settings.items() if key in read or not is_empty(value)}
    if unread := [key for key in used if key not in read]:
        raise UnusableRow(f"the row's chat_template_kwargs hold {unread}, which the chat template never reads")
    return used


def template_variables(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Names that the chat template (or any of several) takes from outside.

    Raises:
        ValueError: it is no valid template.
    """
    template: Any = tokenizer.chat_template
    found: set[str] = set()
    for text in template.values() if isinstance(template, dict) else [template]:
        try:
            found |= _variables(text)
        except TemplateSyntaxError as error:
            raise SettingError(
                "data",
                f"the chat template of {tokenizer.name_or_path!r} is not valid ({error.message}, line {error.lineno})",
                do="Correct tokenizer.chat_template",
            ) from None
    return found


@lru_cache(maxsize=16)
def _variables(text: str) -> frozenset[str]:
    tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION_TAG.sub("", text))
    return frozenset(meta.find_undeclared_variables(tree) - _own_names(tree) - _FUNCTIONS)


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
