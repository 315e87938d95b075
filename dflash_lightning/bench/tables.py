"""A comparison in words: aligned lines for a terminal, or Markdown."""

from __future__ import annotations

import math
from typing import Any

_NONE = "-"


def render(found: dict[str, Any], *, markdown: bool = False) -> str:
    """All tables of a comparison, what differs between the recipes, and what is missing."""
    methods = found["methods"]
    parts = [_section("Tokens per round (tau), by way to decode", _tau_rows(methods, found["baseline"]), markdown)]
    for decoding in _decodings(methods):
        parts.append(_section(f"Tau by domain, {decoding}", _domain_rows(methods, decoding), markdown))
    if any(method["speed"] for method in methods):
        parts.append(_section("Speed, beside plain decoding", _speed_rows(methods), markdown))
    parts.append(_section("Training and answers", _cost_rows(methods), markdown))
    if any(found["differences"].values()):
        parts.append(_list(f"What differs from {found['baseline']}", _differing(found), markdown))
    if found["rank_correlation"]:
        parts.append(_list("Tau expected without decoding", _correlated(found), markdown))
    if found["gaps"]:
        parts.append(_list("Missing or doubtful", found["gaps"], markdown))
    return "\n\n".join(parts) + "\n"


# -- rows -------------------------------------------------------------------------------------------------------------


def _decodings(methods: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for method in methods for name in method["tau"]))


def _tau_rows(methods: list[dict[str, Any]], baseline: str) -> list[list[str]]:
    names = _decodings(methods)
    head = ["method", "seeds", *(cell for name in names for cell in (name, f"more than {baseline} (95 %)"))]
    rows = [head]
    for method in methods:
        row = [method["name"], _seeds(method)]
        for name in names:
            row += [_estimate(method["tau"].get(name, {}).get("all")), _difference(method, name, baseline)]
        rows.append(row)
    return rows


def _seeds(method: dict[str, Any]) -> str:
    """How many seeds, marked where one is missing."""
    return f"{len(method['seeds'])}{' (!)' if method['gaps'] else ''}"


def _difference(method: dict[str, Any], decoding: str, baseline: str) -> str:
    found = method["paired"].get(decoding)
    if found is None:
        return "" if method["name"] == baseline else _NONE
    return f"{_number(found['mean'], '+.3f')} ({_number(found['low'], '+.3f')} to {_number(found['high'], '+.3f')})"


def _domain_rows(methods: list[dict[str, Any]], decoding: str) -> list[list[str]]:
    domains = list(dict.fromkeys(name for method in methods for name in method["tau"].get(decoding, {})))
    rows = [["method", *domains]]
    rows += [
        [method["name"], *(_interval(method["tau"].get(decoding, {}).get(domain)) for domain in domains)]
        for method in methods
    ]
    return rows


def _speed_rows(methods: list[dict[str, Any]]) -> list[list[str]]:
    batches = sorted({batch for method in methods for batch in method["speed"]}, key=int)
    head = ["method"]
    for batch in batches:
        head += [f"batch {batch}: tokens/s", "times plain", "draft ms", "verify ms"]
    rows = [head]
    for method in methods:
        row = [method["name"]]
        for batch in batches:
            found = method["speed"].get(batch, {})
            row += [
                _estimate(found.get("tokens_per_s"), ".1f"),
                _estimate(found.get("speed_up"), ".2f"),
                _estimate(found.get("draft_ms"), ".1f"),
                _estimate(found.get("verify_ms"), ".1f"),
            ]
        rows.append(row)
    return rows


def _cost_rows(methods: list[dict[str, Any]]) -> list[list[str]]:
    rows = [["method", "loss", "CPU-seconds", "steps", "parameters", "repetitive", "cut", "answers", "identical"]]
    for method in methods:
        degenerate, (same, compared) = method["degenerate"], method["identical"]
        rows.append(
            [
                method["name"],
                _estimate(method["loss"], ".4f"),
                _estimate(method["cpu_s"], ".0f"),
                _NONE if method["steps"] is None else str(method["steps"]),
                _NONE if method["parameters"] is None else f"{method['parameters']:,}",
                *(str(degenerate[key]) for key in ("repetitive", "cut", "of")),
                f"{same} of {compared}",
            ]
        )
    return rows


def _differing(found: dict[str, Any]) -> list[str]:
    return [f"{name}: {'; '.join(lines) or 'nothing'}" for name, lines in found["differences"].items()]


def _correlated(found: dict[str, Any]) -> list[str]:
    return [
        f"{decoding}: rank correlation with the decoded tau {_number(told['rho'], '.3f')} over {told['n']} runs"
        for decoding, told in found["rank_correlation"].items()
    ]


# -- cells ------------------------------------------------------------------------------------------------------------


def _number(value: float | None, form: str) -> str:
    return _NONE if value is None or math.isnan(value) else format(value, form)


def _estimate(found: dict[str, Any] | None, form: str = ".3f") -> str:
    """Mean and spread over seeds."""
    if found is None:
        return _NONE
    spread = "" if found["spread"] is None else f" ± {_number(found['spread'], form)}"
    return f"{_number(found['mean'], form)}{spread}"


def _interval(found: dict[str, Any] | None) -> str:
    if found is None:
        return _NONE
    return f"{_number(found['mean'], '.2f')} ({_number(found['low'], '.2f')} to {_number(found['high'], '.2f')})"


# -- layout -----------------------------------------------------------------------------------------------------------


def _section(title: str, rows: list[list[str]], markdown: bool) -> str:
    if markdown:
        lines = [f"| {' | '.join(_in_table(cell) or ' ' for cell in row)} |" for row in rows]
        return "\n".join([f"### {title}", "", lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _in_table(cell: str) -> str:
    """A cell in which nothing ends it."""
    return cell.replace("|", "\\|").replace("\n", " ")


def _list(title: str, lines: list[str], markdown: bool) -> str:
    head = [f"### {title}", ""] if markdown else [title]
    return "\n".join([*head, *(f"{'- ' if markdown else '  '}{line}" for line in lines)])
