"""A report in words: the table that is printed, and why a report is a failure."""

from __future__ import annotations

import math
from typing import Any

_MINUTES = {
    "train": "minutes of training, features included",
    "evaluation": "minutes of evaluations in between",
    "total": "minutes in all",
}


SHOWN = (
    *("tau", "tau_interval", "verdict", "prompts", "note", "other_target", "looped_answers", "cut_answers"),
    *("timed_prompts", "batched_prompts", "batch_size", "s_per_token", "cpu_s_per_token", "device", "dtype", "machine"),
    *("speedup_over_autoregressive", "speedup_over_transformers_generate", "overlap_with_training", "warnings"),
    *("identical_to_transformers_generate", "identical_to_plain_decoding"),
)  # of a report's figures, those without which it cannot be printed


def failures(figures: dict[str, Any], min_tau: float | None) -> list[str]:
    """Why the exit status is 1; empty for a good report.

    In float32 outputs must be identical, in other dtypes they may differ where rounding explains it.
    """
    reasons = []
    if figures["verdict"] == "NO":
        reasons.append(f"{figures['dtype']} output is not the target's own: {_identity(figures)}")
    if min_tau is not None and not (figures["tau"] or 0.0) >= min_tau:
        reasons.append(f"tau is {_number(figures['tau'], '.3f')}, below --min-tau {min_tau:g}")
    return reasons


def table(figures: dict[str, Any]) -> str:
    """The figures as aligned lines."""
    wall, cpu, note = figures["s_per_token"], figures["cpu_s_per_token"], figures["note"]
    rows = [
        (
            "tau (tokens per round, pooled)",
            f"{_number(figures['tau'], '.2f')}{_interval(figures)} on {figures['prompts']} prompts"
            + (f", {note}" if note else ""),
        ),
        *([("measured on another target", _other(figures))] if figures["other_target"] else []),
        ("lossless", f"{figures['verdict']}: {_identity(figures)}"),
        ("answers", f"{figures['looped_answers']} repeat themselves, {figures['cut_answers']} are cut"),
        ("decoded", _decoded(figures)),
        *((f"ms per token, {name}", f"{1e3 * wall[name]:6.1f} wall   {1e3 * cpu[name]:6.1f} CPU") for name in wall),
        ("faster than the same loop without drafts", _times(figures["speedup_over_autoregressive"])),
        ("faster than transformers.generate", _times(figures["speedup_over_transformers_generate"])),
        ("timed on", _hardware(figures)),
    ]
    rows += [(f"in batches of {entry['batch']}", _batch(entry)) for entry in figures.get("speed") or []]
    if figures.get("served"):
        rows.append(("as it is served", figures["served"]))
    if figures["overlap_with_training"] is not None:
        overlap = figures["overlap_with_training"]
        shared = f"{overlap['ngram_share']:.1%} of the prompts'"
        if "answer_ngram_share" in overlap:
            shared += f", {overlap['answer_ngram_share']:.1%} of the answers'"
        rows.append(("13-grams shared with training text", shared))
    if figures.get("finished") is False:
        rows.append(("the run", "not finished: these are figures of what it has trained so far"))
    rows += [
        (label, f"{figures[f'{name}_minutes']:.1f}")
        for name, label in _MINUTES.items()
        if figures.get(f"{name}_minutes") is not None
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join([*(f"  {name.ljust(width)}  {value}" for name, value in rows), *figures["warnings"]])


def _batch(entry: dict[str, Any]) -> str:
    drafted, plain = entry["tokens_per_s"], entry["plain_tokens_per_s"]
    return f"{drafted:.1f} tokens/s, {plain:.1f} without drafts: {drafted / plain:.2f}x, on {entry['prompts']} prompts"


def _number(value: float | None, form: str) -> str:
    """A figure; null (in a file) or NaN is what could not be counted: no round was drafted."""
    return "unknown (no round was drafted)" if value is None or math.isnan(value) else format(value, form)


def _times(value: float | None) -> str:
    return "unknown (no round was drafted)" if value is None else f"{value:.2f}x"


def _interval(figures: dict[str, Any]) -> str:
    interval = figures["tau_interval"]
    return "" if interval is None else f" (95 %: {interval[0]:.2f} to {interval[1]:.2f})"


def _other(figures: dict[str, Any]) -> str:
    other = figures["other_target"]
    return f"made for {other['made_for']}, used on {other['measured_on']}"


def _decoded(figures: dict[str, Any]) -> str:
    """How many prompts were decoded how."""
    timed, batched = figures["timed_prompts"], figures["batched_prompts"]
    return f"{timed} one at a time" + (f", {batched} in batches of {figures['batch_size']}" if batched else "")


def _identity(figures: dict[str, Any]) -> str:
    return (
        f"{figures['identical_to_transformers_generate']} identical to transformers.generate, "
        f"{figures['identical_to_plain_decoding']} of those that were timed to plain decoding"
    )


def _hardware(figures: dict[str, Any]) -> str:
    machine = figures["machine"]
    used = f"{machine['cpu']}, threads: {machine['threads']}" if figures["device"] == "cpu" else machine["gpu"]
    return f"{used}, {figures['dtype']}, one prompt at a time"
