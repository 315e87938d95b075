"""``measured.json``: what was measured of a run, and under which protocol."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_lightning.bench.held import measured_faults
from dflash_lightning.bench.method import Method
from dflash_lightning.files import file_digest, find_draft_place
from dflash_lightning.run import RunFolder

MEASURED_FILE = "measured.json"
VERSION = 1


def read_measured(file: Path) -> dict[str, Any]:
    """What ``dflash measure`` wrote.

    Raises:
        ValueError: it is damaged, no such file, or of another version.
    """
    advice = f"Write it anew: dflash measure {file.parent} --again"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # of decoding as well as of parsing
        raise ValueError(f"{file}: damaged ({error}). {advice}.") from error
    if isinstance(found, dict) and found.get("version", VERSION) != VERSION:
        raise ValueError(f"{file}: has version {found.get('version')}, and this program reads {VERSION}. {advice}.")
    if wrong := measured_faults(found):
        raise ValueError(f"{file}: is no {MEASURED_FILE} ({', '.join(wrong)} is missing or of another kind). {advice}.")
    return found


def training_of(run: RunFolder, checkpoint_step: int | None, parameters: int) -> dict[str, Any]:
    """What training cost and came to, as ``run.json`` tells; null where an older run does not say."""
    state = run.state
    cost = state.get("training") or {}
    return {
        "cpu_s": cost.get("cpu_s"),
        "wall_s": cost.get("wall_s"),
        "steps": state.get("optimizer_steps"),
        "checkpoint_step": checkpoint_step,
        "loss": state.get("loss"),
        "parameters": parameters,
        "rows": state.get("rows"),
    }


def heading(run: RunFolder, recipe: dict[str, Any]) -> dict[str, Any]:
    """Name, recipe, overrides and seed of a run."""
    state = run.state
    method = Method.of_run(state, recipe)
    asked = state.get("asked") or {}
    return {
        "version": VERSION,
        "name": method.name,
        "recipe": method.recipe,
        "overrides": list(asked.get("overrides", ())),
        "seed": recipe.get("seed"),
    }


def drafter_digest(run: Path) -> str | None:
    """sha256 of the checkpoint that is measured of a run; null where it has none."""
    try:
        place = find_draft_place(run, setting="RUN")
    except ValueError:
        return None
    return None if place is None or not place.is_file() else file_digest(place)


def why_anew(run: RunFolder, protocol: dict[str, Any]) -> str | None:
    """Why a run is to be measured (again), in words; null where its ``measured.json`` is of these weights and settings.

    A damaged file is a reason, and no error: it is written anew.
    """
    file = run.path / MEASURED_FILE
    if not file.exists():
        return "not measured yet"
    try:
        found = read_measured(file)
    except ValueError as error:
        return str(error)
    if found["drafter_sha256"] != drafter_digest(run.path):
        return "measured with other weights"
    differing = [key for key in {*found["protocol"], *protocol} if found["protocol"].get(key) != protocol.get(key)]
    return f"measured otherwise ({', '.join(sorted(differing))})" if differing else None
