"""The combinations of parts that other programs can run. Exporters refuse a drafter that is made of others."""

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
from dflash_lightning.model.foreign_parts import CONVOLUTION, LATTICE, MARKOV, PREFIX, REFINER, SELECTOR

AXES: dict[str, type[Component]] = {"conditioning": Conditioning, "drafter": Drafter, "head": DraftHead}
KNOWN_ELSEWHERE = {"conditioning": "kv_injection", "drafter": "block_transformer", "head": "marginal"}
_CONVOLVED = KNOWN_ELSEWHERE | {"drafter": "conv_transformer"}
TRIOS: dict[str, dict[str, str]] = {
    "DFlash": KNOWN_ELSEWHERE,
    "DFlash 2": _CONVOLVED | {"head": "selector"},
    "LiLiCorr": KNOWN_ELSEWHERE | {"head": "lattice"},
    "LiLiCorr with convolutions": _CONVOLVED | {"head": "lattice"},
    "DSpark": KNOWN_ELSEWHERE | {"head": "markov"},
    "xPress": KNOWN_ELSEWHERE | {"head": "refiner"},
    "Domino": KNOWN_ELSEWHERE | {"head": "prefix"},
}
# Settings that files of other programs state themselves, or their tensors show, or that matter to training alone.
_STATED = {
    "conv_transformer": {*CONVOLUTION.values()},
    "selector": {*SELECTOR.values()},
    "lattice": {*LATTICE.values()},
    "markov": {*MARKOV.values(), "confidence_bias", "detach_confidence"},
    "refiner": {*REFINER.values()},
    "prefix": {*PREFIX.values(), "pure_slots"},
}


def trio_of(config: DraftConfig) -> str | None:
    """The name in ``TRIOS`` of the parts that a drafter is made of; null where other programs have no such drafter."""
    parts = {axis: config.components.get(axis, {}) for axis in AXES}
    for trio, names in TRIOS.items():
        if {axis: part.get("name") for axis, part in parts.items()} == names and not any(
            [*_changed(axis, names[axis], part.get("settings") or {})] for axis, part in parts.items()
        ):
            return trio
    return None


def unknown_elsewhere(config: DraftConfig) -> dict[str, str]:
    """The parts of a drafter that other programs would replace by their own, by axis; empty where there are none.

    A part of another name is one, and so is a known part with a setting that neither the configuration's fields nor
    the weights show, unless that setting has its default: ``{"head": "other", "drafter": "block_transformer(x=1)"}``.
    """
    found = {}
    for axis, known in KNOWN_ELSEWHERE.items():
        part = config.components.get(axis, {})
        name = str(part.get("name"))
        shown = name == known or name in _STATED
        changed = ", ".join(_changed(axis, name, part.get("settings") or {})) if shown else ""
        if name != known or changed:
            found[axis] = f"{name}({changed})" if changed else name
    return found


def _changed(axis: str, name: str, settings: dict[str, Any]) -> Iterator[str]:
    part = AXES[axis].registry[name]
    defaults = inspect.signature(part.__init__).parameters
    for setting, value in settings.items():
        if setting in part.initial or FIELD_OF.get(setting, setting) in FIELDS or setting in _STATED.get(name, ()):
            continue
        if setting not in defaults or value != defaults[setting].default:
            yield f"{setting}={value!r}"
