"""What differs between two recipes, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from dflash_lightning.recipe.explain import yaml_words
from dflash_lightning.recipe.folders import group_options, recipes_folder
from dflash_lightning.recipe.yaml import read_mapping

# Of a run or of where it is measured; ``data.seed`` and the like follow ``seed``.
_APART = ("name", "run_dir", "measure", "seed", "logger")
_ANYWHERE = ("seed", "prefetch_features")  # of a run or its device, below a group
_NAMED = ("loss", "callbacks")  # groups whose parts have names and are used together
_RUN = "RUN_DIR"


def differences(recipe: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """``head: markov instead of marginal``, ``optim.lr: 0.001 instead of 0.0006``; of ``recipe`` against ``other``.

    Both are resolved recipes. Seeds, names and folders of the runs are left out.
    """
    mine, theirs = _comparable(recipe), _comparable(other)
    return [line for key in sorted(mine.keys() | theirs.keys()) for line in _of(key, mine.get(key), theirs.get(key))]


def comparable_text(recipe: dict[str, Any]) -> str:
    """Text that two resolved recipes have in common if there are no ``differences`` between them."""
    return json.dumps(_comparable(recipe), sort_keys=True, default=str)


def _comparable(recipe: dict[str, Any]) -> dict[str, Any]:
    """``recipe`` without what belongs to a run, and not to a method."""
    tree = _without_folder(recipe, str(recipe.get("run_dir")))
    return {key: value for key, value in tree.items() if key not in _APART}


def _without_folder(node: Any, folder: str) -> Any:
    if isinstance(node, dict):
        return {key: _without_folder(value, folder) for key, value in node.items() if key not in _ANYWHERE}
    if isinstance(node, list):
        return [_without_folder(value, folder) for value in node]
    return node.replace(folder, _RUN) if isinstance(node, str) else node


def _of(key: str, mine: Any, theirs: Any) -> Iterator[str]:
    if mine == theirs:
        return
    if not isinstance(mine, dict) or not isinstance(theirs, dict):
        yield from _unlike(key, mine, theirs)
    elif mine.get("_target_") != theirs.get("_target_"):
        yield f"{key}: {_part(key, mine)} instead of {_part(key, theirs)}"
    else:
        for name in sorted(mine.keys() | theirs.keys()):
            yield from _of(f"{key}.{name}", mine.get(name), theirs.get(name))


def _unlike(key: str, mine: Any, theirs: Any) -> Iterator[str]:
    """Values of which one is no mapping: a part that only one of them has, or plain values."""
    if isinstance(mine, dict) and theirs is None:
        yield f"{key}: with {_part(key, mine)}"
    elif isinstance(theirs, dict) and mine is None:
        yield f"{key}: without {_part(key, theirs)}"
    else:
        yield f"{key}: {_words(mine)} instead of {_words(theirs)}"


def _words(value: Any) -> str:
    return "the default" if value is None else yaml_words(value)


def _part(key: str, node: dict[str, Any]) -> str:
    """A part by its option's name where one has its class, and the settings that the option does not have."""
    path = node.get("_target_")
    group = key.partition(".")[0]
    option, given = _option(group, str(path))
    if group in _NAMED and key.count(".") == 1:
        given = next((part for part in given.values() if isinstance(part, dict)), {})
    own = [
        f"{name} {yaml_words(value)}"
        for name, value in node.items()
        if name != "_target_" and value is not None and given.get(name) != value
    ]
    name = option or str(path).rpartition(".")[2]
    return f"{name} ({', '.join(own)})" if own else name


@lru_cache(maxsize=32)
def _options(group: str) -> dict[str, dict[str, Any]]:
    """The content of every shipped option of a group; reading them takes a comparison longer than the rest of it."""
    return {name: read_mapping(recipes_folder() / group / f"{name}.yaml") for name in group_options().get(group, ())}


@lru_cache(maxsize=256)
def _option(group: str, path: str) -> tuple[str, dict[str, Any]]:
    """The one shipped option of a group that makes a class, and its file's content; empty where it is not one."""
    found = []
    for name, tree in _options(group).items():
        nodes = [tree, *(part for part in tree.values() if isinstance(part, dict))]
        if any(node.get("_target_") == path for node in nodes):
            found.append((name, tree))
    return found[0] if len(found) == 1 else ("", {})
