"""Evaluations in words: the heading of each, and several side by side."""

from __future__ import annotations

import math

from dflash_lightning.commands.drafts import other_target_line
from dflash_lightning.commands.measured import Measured
from dflash_lightning.decoding.interval import difference_interval, pooled_tau


def title(measured: Measured) -> str:
    """What was measured, on what."""
    names = [str(file.path) for file in measured.files]
    prompts = names[0] if len(names) == 1 else f"{len(names)} files of prompts"
    other = other_target_line(measured.other_target)
    return f"{measured.draft.source} on {prompts}" + (f", {other}" if other else "")


def side_by_side(found: list[Measured]) -> str:
    """A row per drafter; empty for a single one. The difference to the first is of the same prompts, drawn together."""
    if len(found) < 2:
        return ""
    single = all(measured.evaluation.batch_size == 1 for measured in found)
    head = ["drafter", "tau (95 %)", "more than the first (95 %)", "whole blocks"]
    rows = [head + ["ms per draft", "speed-up"] * single + ["lossless"]]
    for measured in found:
        evaluation, interval = measured.evaluation, measured.interval
        row = [
            str(measured.draft.source) + (" (other target)" if measured.other_target else ""),
            _number(evaluation.stats.tau, ".2f") + ("" if interval is None else f" ({interval})"),
            "" if measured is found[0] else _more(found[0], measured),
            _number(evaluation.stats.ceiling, ".1%"),
        ]
        if single:
            row.append(_number(evaluation.stats.stage_ms("draft"), ".1f"))
            row.append("-" if evaluation.speedup is None else f"{evaluation.speedup:.2f}x")
        rows.append([*row, evaluation.verdict])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(["", *lines, ""])


def _more(first: Measured, other: Measured) -> str:
    ours, theirs = first.evaluation.generations, other.evaluation.generations
    interval = difference_interval(ours, theirs)
    more = _number(pooled_tau(theirs) - pooled_tau(ours), "+.2f")
    return more if interval is None else f"{more} ({interval.low:+.2f} to {interval.high:+.2f})"


def _number(value: float, form: str) -> str:
    """A figure, or a dash where nothing was counted."""
    return "-" if math.isnan(value) else format(value, form)
