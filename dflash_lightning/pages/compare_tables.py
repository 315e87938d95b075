"""Tables of methods side by side."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_lightning.pages.markup import Child, Html, join, tag
from dflash_lightning.pages.methods import ALL, Comparison, Method
from dflash_lightning.pages.numbers import Estimate, fixed, gap, percent, short
from dflash_lightning.pages.page import table

_SPEED = (
    ("tokens_per_s", "tokens/s", 1),
    ("speed_up", "speed-up", 2),
    ("draft_ms", "draft, ms", 1),
    ("verify_ms", "verify, ms", 1),
    ("commit_ms", "commit, ms", 1),
    ("host_ms", "host, ms", 1),
)


def main_table(found: Comparison) -> Html:
    """Tau and what it costs, a row per method."""
    decodings = found.decodings
    columns = [
        *("method", "seeds"),
        *(f"tau, {decoding}" for decoding in decodings),
        *([f"against {found.baseline}, {decoding}" for decoding in decodings] if found.baseline else []),
        *("loss", "training, CPU-s", "parameters"),
    ]
    rows = []
    for method in found.methods:
        paired = [_paired(method, decoding) for decoding in decodings] if found.baseline else []
        rows.append(
            [
                method_name(method),
                str(len(method.seeds)) if method.seeds else gap("no seed was measured"),
                *(_cell(method.tau(decoding), f"{decoding} was not measured") for decoding in decodings),
                *paired,
                _cell(method.figure("loss"), "no loss is known", digits=3),
                _cell(method.figure("cpu_s"), "no training time is known", digits=0),
                _parameters(method),
            ]
        )
    return table(columns, rows)


def method_name(method: Method) -> Child:
    """A method's name; the baseline is marked."""
    return [method.name, tag("small", " (baseline)")] if method.baseline else method.name


def _cell(estimate: Estimate | None, reason: str, digits: int = 2) -> Child:
    return gap(reason) if estimate is None else estimate.cell(digits)


def _paired(method: Method, decoding: str) -> Child:
    """The difference to the baseline; coloured, with a sign, only where its interval leaves out zero."""
    if method.baseline:
        return tag("small", "is the baseline")
    estimate = method.paired(decoding)
    if estimate is None:
        return gap("no prompts and seeds in common with the baseline")
    cell = join(estimate.cell(signed=True))
    if estimate.interval is None or estimate.interval[0] <= 0.0 <= estimate.interval[1]:
        return cell
    up = estimate.mean > 0
    return tag("span", "▲ " if up else "▼ ", cell, class_="up" if up else "down")


def _parameters(method: Method) -> Child:
    found = method.figure("parameters")
    return gap("not counted") if found is None else short(found.mean)


def domains(found: Comparison, decoding: str) -> Html:
    """Tau by domain, for one way of decoding."""
    names = found.domains(decoding)
    columns: list[Child] = [f"tau, {decoding}", *("all prompts" if name == ALL else name for name in names)]
    rows = [
        [method_name(m), *(_cell(m.tau(decoding, name), f"{name} was not measured") for name in names)]
        for m in found.methods
    ]
    return table(columns, rows)


def speeds(found: Comparison) -> Html:
    """Speed at every batch size, side by side."""
    batches = found.batches
    groups = tag(
        "tr",
        tag("th", ""),
        [tag("th", f"batch {batch}", colspan=str(len(_SPEED)), class_="group") for batch in batches],
    )
    columns = ["method", *(title for _ in batches for _, title, _ in _SPEED)]
    rows = [
        [
            method_name(method),
            *(
                _cell(method.speed(batch, name), f"not timed at batch {batch}", digits)
                for batch in batches
                for name, _, digits in _SPEED
            ),
        ]
        for method in found.methods
    ]
    return table(columns, rows, groups=groups)


def survival(found: Comparison) -> Html:
    """Share of rounds whose drafts stand up to each slot; the darker, the more."""
    slots = max((len(method.survival) for method in found.methods), default=0)
    if not slots:
        return tag("p", "No share by slot was measured.", class_="gap")
    columns = ["drafts that stand up to slot", *(str(k) for k in range(1, slots + 1))]
    return table(columns, [[method_name(method), *_shares(method.survival, slots)] for method in found.methods])


def _shares(values: Sequence[float | None], slots: int) -> list[Child]:
    return [_shaded(value) for value in (*values, *[None] * (slots - len(values)))]


def _shaded(share: float | None) -> Html:
    if share is None:
        return gap("no such slot was measured")
    return tag("span", fixed(share), class_="heat", style=f"--share: {min(1.0, max(0.0, share)):.3f}")


def beside_tau(found: Comparison) -> Html:
    """Degenerate answers, identity with plain decoding, and tau as it was predicted without decoding."""
    decodings = [d for d in found.decodings if any(method.expected(d) for method in found.methods)]
    columns: list[Child] = [
        *("method", "repeat themselves", "cut at the limit", "answers", "identical to plain decoding"),
        *(f"expected tau, {decoding}" for decoding in decodings),
    ]
    rows = []
    for method in found.methods:
        of = method.count("degenerate", "of") or None  # of no answer nothing is known
        rows.append(
            [
                method_name(method),
                *(_count(method.count("degenerate", name), of) for name in ("repetitive", "cut")),
                gap("not counted") if of is None else str(of),
                gap("nothing was compared") if not method.identical else _of(*method.identical),
                *(_cell(method.expected(decoding), "not predicted") for decoding in decodings),
            ]
        )
    return table(columns, rows)


def _count(count: int | None, of: int | None) -> Child:
    if count is None or of is None:
        return gap("not counted")
    return [str(count), tag("small", f" ({percent(count / of)})")]


def _of(part: int, whole: int) -> Child:
    if not whole:
        return gap("nothing was compared")
    text = f"{part} of {whole}"
    return text if part == whole else tag("span", f"▼ {text}", class_="down")
