"""A measured run in a line."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def tau_of(rows: Iterable[dict[str, Any]]) -> float:
    """Tokens committed per round, pooled over rows of ``prompts``; NaN without a round."""
    rounds = committed = 0
    for row in rows:
        rounds, committed = rounds + row["rounds"], committed + row["committed"]
    return committed / rounds if rounds else math.nan


def one_line(measured: dict[str, Any]) -> str:
    """``tau 2.31 greedy, 2.02 sampling; 1.43x at batch 1; 12 of 12 outputs identical``."""
    rows = measured["prompts"]
    taus = [
        f"{tau_of(row for row in rows if row['decoding'] == name):.2f} {name}"
        for name in dict.fromkeys(row["decoding"] for row in rows)
    ]
    speeds = [
        f"{row['tokens_per_s'] / row['plain_tokens_per_s']:.2f}x at batch {row['batch']}"
        for row in measured["speed"]
        if row["tokens_per_s"] and row["plain_tokens_per_s"]
    ]
    same = measured["identical"]
    parts = [f"tau {', '.join(taus)}", ", ".join(speeds)]
    parts += [f"{same['identical']} of {same['compared']} outputs identical"] if same["compared"] else []
    return "; ".join(part for part in parts if part)
