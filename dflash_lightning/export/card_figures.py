"""The figures of a model card: those of a report, else those that the run's own evaluation found; never others."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

_CAUTION = (
    "The figures hold for prompts of that kind, rendered and decoded like that. Prompts like the training rows are "
    "accepted best; on text of another kind tau may come down to little more than 1. Measure your own prompts: "
    "`dflash evaluate --draft RUN --prompts FILE`."
)


def measured(report: Mapping[str, Any] | None) -> str:
    """The table, with what it was measured on; ``report`` is a report.json, figures of a run, or null.

    Figures of a run have ``tau``, ``step`` and, as far as it is known, ``prompts_file``, ``prompts``, ``batch_size``,
    ``max_new_tokens``, ``temperature``, ``accepted_share``, ``identical_share``, ``measured_at``.
    """
    if report is None:
        return "Nothing was measured of this drafter. `dflash report RUN` measures a run; export it again afterwards."
    whole = "s_per_token" in report
    rows = _report_rows(report) if whole else _run_rows(report)
    table = "\n".join(f"| {name} | {value} |" for name, value in rows if value not in (None, ""))
    return f"| figure | value |\n|---|---|\n{table}\n\n{_how(report) if whole else _HOW_OF_RUN} {_CAUTION}"


_HOW_OF_RUN = (
    "By the evaluation of the training run itself, of these weights before they were rounded; speed was not measured "
    "(`dflash report RUN` does, then export again)."
)


def _report_rows(report: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [
        ("tokens per round (tau), pooled", f"{report['tau']:.2f}"),
        ("prompts", _prompts(report)),
        *_settings(report),
        ("identical to plain decoding (those that were timed)", report["identical_to_plain_decoding"]),
        ("identical to `transformers.generate`", report["identical_to_transformers_generate"]),
        *((f"ms per token, {name.replace('_', ' ')}", f"{1e3 * s:.1f}") for name, s in report["s_per_token"].items()),
        ("faster than the same loop without drafts", f"{report['speedup_over_autoregressive']:.2f}x"),
        ("faster than `transformers.generate`", f"{report['speedup_over_transformers_generate']:.2f}x"),
    ]


def _run_rows(figures: Mapping[str, Any]) -> list[tuple[str, Any]]:
    share, same = figures.get("accepted_share"), figures.get("identical_share")
    return [
        ("tokens per round (tau), pooled", f"{figures['tau']:.2f}"),
        ("optimizer steps", figures.get("step")),
        ("prompts", _prompts(figures)),
        *_settings(figures),
        ("drafts accepted", None if share is None else f"{share:.1%}"),
        ("checked outputs identical to plain decoding", None if same is None else f"{same:.1%}"),
    ]


def _prompts(report: Mapping[str, Any]) -> str | None:
    """How many, what they are in words, and the file."""
    count, note, file = (report.get(name) for name in ("prompts", "note", "prompts_file"))
    what = ", ".join(str(part) for part in (note, file) if part)
    if count is None:
        return what or None
    return f"{count} ({what})" if what else str(count)


def _settings(report: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """How the prompts were decoded, and when."""
    asked = {**(report.get("asked") or {}), **report}
    temperature, when = asked.get("temperature"), asked.get("measured_at")
    return [
        ("decoded together, for tau", asked.get("batch_size")),
        ("tokens of an answer, at most", asked.get("max_new_tokens")),
        ("temperature", temperature or None),
        ("measured on", None if when is None else datetime.fromtimestamp(when, timezone.utc).date().isoformat()),
    ]


def _how(report: Mapping[str, Any]) -> str:
    where = report["machine"]["cpu" if report["device"] == "cpu" else "gpu"]
    return (
        f"By dflash-lightning's own loop, with the drafter before it was rounded, on {where}, {report['dtype']}; times "
        "are of one prompt at a time."
    )
