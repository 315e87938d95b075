"""What the command line takes out of a recipe's callbacks takes along what hangs on it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig

_GROUP = "callbacks"


def drop_unchosen(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Remove callbacks' settings that an override of the command line has left without their callback.

    ``callbacks=[checkpoint_last]`` leaves the recipe's settings of ``speculative_eval`` behind, without a class;
    ``~callbacks.speculative_eval`` leaves the checkpoint that follows its figure. Settings that stand on the command
    line themselves stay, so that the check names them.
    """
    nodes = cfg.get(_GROUP)
    if not isinstance(nodes, DictConfig):
        return
    written = {match[1] for text in overrides if (match := re.match(rf"\+*{_GROUP}\.(\w+)\.", text))}
    if any(text.startswith(f"{_GROUP}=") for text in overrides):
        for name in [name for name in nodes if name not in written and not _class_of(nodes, name)]:
            del nodes[name]
    removed = any(text.startswith(f"~{_GROUP}") for text in overrides)
    measured = any(_class_of(nodes, name).endswith("SpeculativeEval") for name in nodes)
    if removed and not measured:
        for name in [name for name in nodes if name not in written and _follows_decoding(nodes, name)]:
            del nodes[name]


def _class_of(nodes: DictConfig, name: Any) -> str:
    node = nodes._get_node(name)
    return str(node.get("_target_", "")) if isinstance(node, DictConfig) else "a value"


def _follows_decoding(nodes: DictConfig, name: Any) -> bool:
    return _class_of(nodes, name).endswith("ModelCheckpoint") and str(nodes[name].get("monitor")).startswith("decode/")
