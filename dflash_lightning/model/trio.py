"""The one combination of parts that other programs can run. Exporters refuse a drafter that is made of others."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from dflash_lightning.component import Component
from dflash_lightning.conditioning import Conditioning
from dflash_lightning.draft_config import FIELDS, DraftConfig
from dflash_lightning.drafter import Drafter
from dflash_lightning.geometry import FIELD_OF
from dflash_lightning.head import DraftHead

AXES: dict[str, type[Component]] = {"conditioning": Conditioning, "drafter": Drafter, "head": DraftHead}
KNOWN_ELSEWHERE = {"conditioning": "kv_injection", "drafter": "block_transformer", "head": "marginal"}


def unknown_elsewhere(config: DraftConfig) -> dict[str, str]:
    """The parts of a drafter that other programs would replace by their own, by axis; empty where there are none.

    A part of another name is one, and so is a known part with a setting that neither the configuration's fields nor
    the weights show, unless that setting has its default: ``{"head": "other", "drafter": "block_transformer(x=1)"}``.
    """
    found = {}
    for axis, known in KNOWN_ELSEWHERE.items():
        part = config.components.get(axis, {})
        name = str(part.get("name"))
        changed = ", ".join(_changed(axis, name, part.get("settings") or {})) if name == known else ""
        if name != known or changed:
            found[axis] = f"{name}({changed})" if changed else name
    return found


def _changed(axis: str, name: str, settings: dict[str, Any]) -> Iterator[str]:
    part = AXES[axis].registry[name]
    defaults = inspect.signature(part.__init__).parameters
    for setting, value in settings.items():
        if setting in part.initial or FIELD_OF.get(setting, setting) in FIELDS:
            continue
        if setting not in defaults or value != defaults[setting].default:
            yield f"{setting}={value!r}"
