"""What programs outside of this package compute: one trio of parts. Whatever else a drafter is made of is refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from dflash_lightning.component import Component
from dflash_lightning.conditioning import Conditioning
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.drafter import Drafter
from dflash_lightning.head import DraftHead

AXES: dict[str, type[Component]] = {"conditioning": Conditioning, "drafter": Drafter, "head": DraftHead}
KNOWN_ELSEWHERE = {"conditioning": "kv_injection", "drafter": "block_transformer", "head": "marginal"}
# Settings that ``DraftConfig`` has as fields of another name.
FIELD_OF = {
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "num_layers": "num_hidden_layers",
}


def unknown_elsewhere(config: DraftConfig) -> dict[str, str]:
    """The parts of a drafter that other programs would replace by their own, by axis; empty where there are none.

    A part of another name is one, and so is a known part with a setting that neither the configuration's fields nor
    the weights show, unless that setting has its default: ``{"head": "other", "drafter": "block_transformer(x=1)"}``.
    """
    found = {}
    for axis, known in KNOWN_ELSEWHERE.items():
        part = config.components.get(axis, {})
        name = str(part.get("name"))
        changed = ", ".join(_changed(axis, name, part.get("settings") or {}, config)) if name == known else ""
        if name != known or changed:
            found[axis] = f"{name}({changed})" if changed else name
    return found


def _changed(axis: str, name: str, settings: dict[str, Any], config: DraftConfig) -> Iterator[str]:
    part = AXES[axis].registry[name]
    fields, defaults = (inspect.signature(made.__init__).parameters for made in (type(config), part))
    for setting, value in settings.items():
        if setting in part.initial or FIELD_OF.get(setting, setting) in fields:
            continue
        if setting not in defaults or value != defaults[setting].default:
            yield f"{setting}={value!r}"
