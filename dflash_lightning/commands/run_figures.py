"""What was measured of a drafter, as its run tells: report.json, else the evaluation that made its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_lightning.commands.drafts import FoundDraft, run_of
from dflash_lightning.data import load_prompts
from dflash_lightning.files import file_digest, find_file
from dflash_lightning.run import RunFolder

REPORT_FILE = "report.json"
PROMPTS_KEY = "callbacks.speculative_eval.prompts"


def figures_of(draft: FoundDraft) -> dict[str, Any] | None:
    """The run's report if it is one of this very checkpoint, else its own evaluation's figures; null without either."""
    place = run_of(draft.source)
    if place is None:
        return None
    folder = RunFolder(place)
    return _report(draft, folder) or _evaluated(draft, folder)


def read_report(file: Path) -> dict[str, Any]:
    """What ``dflash report`` wrote to ``file``; empty where nothing is there, or what is there is no report.

    The latter is said: figures can be measured again, so it is no reason to stop.
    """
    try:
        report = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except ValueError:  # of decoding as well as of parsing
        report = None
    if report == {} or (isinstance(report, dict) and isinstance(report.get("asked"), dict) and "tau" in report):
        return report
    print(f"{file} is damaged or no report: its figures are not used. Write it anew with dflash report {file.parent}")
    return {}


def own_prompts(draft: FoundDraft) -> dict[str, Any]:
    """``prompts`` and ``limit`` of the evaluation during the drafter's run; empty where it had none."""
    callbacks = draft.recipe.get("callbacks")
    settings = callbacks.get("speculative_eval") if isinstance(callbacks, dict) else None
    return settings if isinstance(settings, dict) and settings.get("prompts") else {}


def trained_length(draft: FoundDraft) -> int | None:
    """The most tokens that a training row had; null where no recipe says so."""
    length = (draft.recipe.get("data") or {}).get("max_length")
    return length if isinstance(length, int) else None


def _report(draft: FoundDraft, folder: RunFolder) -> dict[str, Any] | None:
    file = folder.path / REPORT_FILE
    if not file.exists():
        return None
    report = read_report(file)
    if not report or report["tau"] is None:  # answers of one token: no round was drafted, so nothing was measured
        return None
    if report["asked"].get("drafter_sha256") != file_digest(draft.source):
        print(f"{file} is of another checkpoint than {draft.source}: the model card does not take its figures")
        return None
    return report


def _evaluated(draft: FoundDraft, folder: RunFolder) -> dict[str, Any] | None:
    measured, state = draft.measured, folder.state
    tau, step = measured.get("decode/tau"), measured.get("step")
    if tau is None and state.get("finished") and step == state.get("optimizer_steps"):
        tau = state.get("tau")  # of the last checkpoint, which is written before it is measured
    if tau is None or step is None:
        return None
    settings = own_prompts(draft)
    told = settings.get("decoding")
    decoding = told if isinstance(told, dict) else {}
    names = ("batch_size", "max_new_tokens", "temperature")
    identical = measured.get("decode/identical_share")
    return {
        "tau": tau,
        "step": int(step),
        "accepted_share": measured.get("decode/accepted_share"),
        "identical_share": identical if identical == identical else None,
        "prompts_file": settings.get("prompts"),
        "prompts": _count(settings, folder),
        "measured_at": state.get("finished_at"),
        **{name: decoding.get(name) for name in names},
    }


def _count(settings: dict[str, Any], folder: RunFolder) -> int | None:
    """How many prompts there were, as long as their file is still the one that the run read."""
    try:
        file = find_file(Path(settings["prompts"]), setting=PROMPTS_KEY)
        if folder.state.get("data", {}).get(PROMPTS_KEY) != file_digest(file):
            return None
        return len(load_prompts(file, limit=settings.get("limit", 64)))
    except (KeyError, TypeError, ValueError):
        return None
