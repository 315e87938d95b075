"""A recipe as plain containers: interpolations resolved, and a mark where there is no value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from dflash_lightning.recipe.faults import Fault


class _Unknown:
    """Stands for a value that has its own fault already, or that is checked where it is written."""


UNKNOWN = _Unknown()


def plain_tree(cfg: DictConfig, faults: list[Fault]) -> dict[str, Any]:
    """The recipe as plain containers; open values and interpolations that fail are added to ``faults``."""
    tree = _plain(cfg, "", faults)
    assert isinstance(tree, dict)
    return tree


def _plain(node: DictConfig | ListConfig, where: str, faults: list[Fault]) -> Any:
    keys: list[Any] = list(node.keys()) if isinstance(node, DictConfig) else list(range(len(node)))
    values = {key: _plain_value(node, key, f"{where}.{key}" if where else str(key), faults) for key in keys}
    return values if isinstance(node, DictConfig) else list(values.values())


def _plain_value(node: Any, key: Any, where: str, faults: list[Fault]) -> Any:
    if OmegaConf.is_missing(node, key):
        example = f"{where}=VALUE"
        faults.append(
            Fault(where, "required, and the recipe leaves it open", f"Add {example} to the command, or set it")
        )
        return UNKNOWN
    try:
        value = node[key]
    except InterpolationToMissingValueError:
        return UNKNOWN  # reported where the value is missing
    except OmegaConfBaseException as error:
        text = OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index,call-overload]
        reason = str(error).splitlines()[0]
        faults.append(Fault(where, f"{text!r} cannot be resolved ({reason})", f"Set it: {where}=VALUE"))
        return UNKNOWN
    if isinstance(value, DictConfig | ListConfig):
        return UNKNOWN if OmegaConf.is_interpolation(node, key) else _plain(value, where, faults)
    return value


def holds_unknown(value: Any) -> bool:
    """Whether a value is open, or a part of it is."""
    if isinstance(value, dict | list):
        return any(holds_unknown(v) for v in (value.values() if isinstance(value, dict) else value))
    return value is UNKNOWN


def mapping_at(tree: Any, *keys: str) -> dict[str, Any]:
    """The mapping under ``keys``; empty where there is none."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else {}


def select(tree: Any, pattern: str) -> Iterator[tuple[str, Any]]:
    """``(dotted key, value)`` of everything that ``pattern`` names; ``*`` is any key (``callbacks.*.prompts``)."""
    yield from _select(tree, pattern.split("."), "")


def _select(node: Any, parts: list[str], where: str) -> Iterator[tuple[str, Any]]:
    if not parts:
        yield where, node
    elif isinstance(node, dict):
        for key in node if parts[0] == "*" else [parts[0]] if parts[0] in node else []:
            yield from _select(node[key], parts[1:], f"{where}.{key}" if where else key)
