"""Every setting that a recipe has or could have: value, default, what is allowed and one line of help.

Read from the source of the classes that the recipe names, their docstrings and the comments of recipe files.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dflash_lightning.recipe.faults import Fault
from dflash_lightning.recipe.folders import recipes_folder
from dflash_lightning.recipe.hints import describe
from dflash_lightning.recipe.ranges import range_of
from dflash_lightning.recipe.source import SourceSignature, read_hint, read_signature
from dflash_lightning.recipe.tree import UNKNOWN, mapping_at, plain_tree, select

_MODULE = "dflash_lightning.module.DraftModule"
_WIDTH = 100  # of a line of help
# Settings that belong to no class: their default and what they are.
_OWN = {
    "name": ("the file's name", "names the run"),
    "run_dir": ("runs/NAME", "folder of recipe, checkpoints and logs"),
    "target.suggested": ("none", "what the target proposes for its drafters; recipes read it"),
}


@dataclass(frozen=True)
class Setting:
    """One line of ``dflash show --all``; ``default`` is null where a value is required."""

    key: str
    value: str
    default: str | None
    allowed: str
    help: str

    def __str__(self) -> str:
        default = "required" if self.default is None else f"default {self.default}"
        told = [default, self.allowed, self.help]
        return f"{self.key}: {self.value}  # " + "; ".join(text for text in told if text)


def settings(cfg: DictConfig) -> Iterator[Setting]:
    """The settings of a recipe with interpolations resolved, top level first, then group by group."""
    tree = plain_tree(cfg, [])
    for key, value in _references(cfg, tree):
        mapping_at(tree, *key.split(".")[:-1])[key.rpartition(".")[2]] = value
    nodes = {key: value for key, value in tree.items() if isinstance(value, dict)}
    module = read_signature(_MODULE)
    for key in [key for key in tree if key not in nodes]:
        yield _setting(key, tree[key], module, key)
    for key, node in nodes.items():
        if "_target_" in node:
            yield from _node(key, node)
        else:
            for name, part in node.items():
                yield from _node(f"{key}.{name}", part if isinstance(part, dict) else {})


def _references(cfg: DictConfig, tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings that stand for a whole group (``${decoding}``, ``${logger}``), with its values."""
    for where, value in [*select(tree, "*.*"), *select(tree, "callbacks.*.*")]:
        whole = None if value is not UNKNOWN else _group_behind(cfg, where)
        if isinstance(whole, dict):
            yield where, {key: item for key, item in whole.items() if key != "_target_"}


def _group_behind(cfg: DictConfig, where: str) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.select(cfg, where), resolve=True)
    except (OmegaConfBaseException, ValueError):
        return None


def _node(where: str, node: dict[str, Any]) -> Iterator[Setting]:
    path = node.get("_target_")
    yield Setting(f"{where}._target_", str(path), None, "class path", "")
    try:
        signature = read_signature(path) if isinstance(path, str) else None
    except ValueError:
        signature = None
    supplied = {"target", "callbacks"} if where in ("data", "trainer") else set()
    names = [] if signature is None else [name for name in signature.parameters if name not in supplied]
    for name in [*names, *(key for key in node if key not in names and key != "_target_")]:
        value = node.get(name, _absent(signature, name))
        if isinstance(value, dict) and "_target_" in value:
            yield from _node(f"{where}.{name}", value)
        else:
            yield _setting(f"{where}.{name}", value, signature, name)


def _absent(signature: SourceSignature | None, name: str) -> Any:
    parameter = None if signature is None else signature.parameters.get(name)
    return UNKNOWN if parameter is None or parameter.default is None else _literal(parameter.default)


def _literal(expression: ast.expr) -> Any:
    try:
        return ast.literal_eval(expression)
    except ValueError:
        return _Code(ast.unparse(expression))


class _Code(str):
    """A default that is an expression, shown as it is written."""

    def __repr__(self) -> str:
        return str(self)


def _setting(key: str, value: Any, signature: SourceSignature | None, name: str) -> Setting:
    parameter = None if signature is None else signature.parameters.get(name)
    bounds, allowed, default = range_of(key), "", _OWN[key][0] if key in _OWN else None
    if parameter is not None and signature is not None:
        allowed = describe(read_hint(parameter.annotation, signature.module))
        default = None if parameter.default is None else yaml_words(_literal(parameter.default))
    if allowed == "Any":
        allowed = ""
    if bounds is not None:
        allowed = ", ".join(text for text in (allowed, str(bounds)) if text)
    return Setting(key, "???" if value is UNKNOWN else yaml_words(value), default, allowed, _help(key, signature, name))


def yaml_words(value: Any) -> str:
    """A value as one writes it in a recipe."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(yaml_words, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {yaml_words(item)}" for key, item in value.items()) + "}"
    return "???" if value is UNKNOWN else str(value) if not isinstance(value, str) or value else "''"


# -- help -------------------------------------------------------------------------------------------------------------


def _help(key: str, signature: SourceSignature | None, name: str) -> str:
    """The first that says something.

    A comment behind the argument, the docstring's Args, a sentence there that names it, or a comment in a recipe.
    """
    found = _OWN.get(key, ("", ""))[1]
    if not found and signature is not None:
        documents = [inspect.cleandoc(text) for text in signature.documents]
        note = signature.parameters[name].note if name in signature.parameters else ""
        sources = [note, *(_args_line(text, name) for text in documents), *(_mention(t, name) for t in documents)]
        found = next((text for text in sources if text), "")
    return _short(found or _comments().get(f"{key.partition('.')[0]}.{name}", "") or _comments().get(key, ""))


def _args_line(document: str, name: str) -> str:
    """What a Google-style ``Args`` section says of ``name``."""
    lines, found = document.partition("Args:\n")[2].splitlines(), []
    indent = None
    for line in lines:
        start = re.match(rf"(\s+)\*{{0,2}}{re.escape(name)}(\s*\([^)]*\))?:\s*(.*)", line)
        if start and indent is None:
            indent = len(start[1])
            found.append(start[3])
        elif indent is not None:
            if line.strip() and len(line) - len(line.lstrip()) <= indent:
                break
            found.append(line.strip())
    return " ".join(text for text in found if text)


def _mention(document: str, name: str) -> str:
    """The sentence that speaks of ``name``."""
    text = " ".join(document.partition("Args:")[0].split())
    return next((s for s in re.split(r"(?<=[.;:])\s+(?=[`A-Z])", text) if f"``{name}``" in s), "")


def _short(text: str) -> str:
    """The first sentence, in one line of bearable length."""
    text = " ".join(text.replace("``", "").split())
    first = re.split(r"(?<=[.;])\s+(?=[A-Z])", text)[0].rstrip(".;")
    if len(first) <= _WIDTH:
        return first
    return first[: first.rfind(" ", 0, _WIDTH)].rstrip(",;: ") + " ..."


@lru_cache(maxsize=1)
def _comments() -> dict[str, str]:
    """Comments behind ``key: value`` in the shipped files: ``group.key``, or ``key`` of a recipe's top level."""
    found: dict[str, str] = {}
    for file in sorted(recipes_folder().rglob("*.yaml")):
        group = "" if file.parent.resolve() == recipes_folder().resolve() else f"{file.parent.name}."
        for line in file.read_text(encoding="utf-8").splitlines():
            match = re.match(r"\s*(\w+):.*?\s#\s*(.*)", line)
            if match and (group or not line.startswith(" ")):
                found.setdefault(f"{group}{match[1]}", match[2])
    return found


def open_values(faults: list[Fault]) -> list[str]:
    """Keys of the faults that only say that a value is open."""
    return [fault.where for fault in faults if fault.what == "required, and the recipe leaves it open"]


def named_parts(tree: dict[str, Any]) -> str:
    """How to take out one of several loss terms; empty where there is one."""
    terms = [name for name in mapping_at(tree, "loss")]
    if len(terms) < 2:
        return ""
    return (
        f"loss: {' + '.join(terms)} are added up. To leave one out: ~loss.{terms[0]} behind the command, or "
        f"loss: {{{terms[0]}: null}} in the file."
    )
