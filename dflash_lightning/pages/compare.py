"""The page of ``dflash compare --html``: methods side by side, each figure with how sure it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dflash_lightning.pages.charts_compare import Point, Row, scatter_chart, whisker_chart
from dflash_lightning.pages.compare_tables import beside_tau, domains, main_table, speeds, survival
from dflash_lightning.pages.markup import Child, Html, tag
from dflash_lightning.pages.methods import Comparison, Method
from dflash_lightning.pages.numbers import Estimate, fixed, known
from dflash_lightning.pages.page import charts, facts, listing, page, paragraph, section, warning

_NO_WORDS = "The comparison says nothing of it."


def compare_page(comparison: Mapping[str, Any]) -> str:
    """The whole page, from what ``dflash compare --json`` writes.

    A figure that is missing is shown as missing, in tables and in charts.

    Raises:
        ValueError: the comparison is of another version, or holds no method.
    """
    found = Comparison.read(comparison)
    sections = [
        _gaps(found),
        section(
            "Tokens per round",
            paragraph(
                "Tau is the number of tokens that a round of drafting and judging adds to the answer, pooled over all "
                "prompts: their sum divided by the number of rounds. Dots are means over seeds, bars are 95 % "
                "intervals over prompts and seeds, the dashed line is the baseline's mean."
            ),
            _taus(found),
            main_table(found),
            tag(
                "p",
                "± is the standard deviation over seeds. Below it stands the 95 % interval of tau and of differences, "
                "and of all else the smallest and the largest seed.",
                class_="note",
            ),
        ),
        _differences_of_tau(found),
        section("By domain", *(domains(found, decoding) for decoding in found.decodings)),
        _training(found),
        _speed(found),
        section("How far drafts stand", survival(found)),
        section(
            "Beside tau",
            paragraph(
                "An answer that repeats itself is easy to draft, and one that was cut at the length limit has no end: "
                "tau over many of them says little of the drafter."
            ),
            beside_tau(found),
            *(_correlation(decoding, told) for decoding, told in found.correlations.items()),
        ),
        _words(found),
        section("Protocol", facts(_flat({**found.about, **found.protocol}), title="What all methods share")),
    ]
    return page("Methods on one bench", _lead(found), sections)


def _lead(found: Comparison) -> Html:
    seeds = sorted({len(method.seeds) for method in found.methods})
    count = " to ".join(str(n) for n in (seeds if len(seeds) == 1 else (seeds[0], seeds[-1])))
    held = "no baseline" if found.baseline is None else f"held against {found.baseline}"
    return paragraph(f"{len(found.methods)} methods, {count} {'seed' if count == '1' else 'seeds'} each, {held}.")


def _gaps(found: Comparison) -> Html | None:
    """What is missing, before any figure is read."""
    named: list[Child] = [
        [tag("b", m.name), f": {gap}"] for m in found.methods for gap in m.gaps if not _is_told(gap, found)
    ]
    if found.baseline is not None and found.standard is None:
        named.append(f"The baseline {found.baseline} is not among the methods: nothing is held against it.")
    items: list[Child] = [*found.gaps, *named]
    if not items:
        return None
    return warning(
        paragraph(tag("b", "Not everything was measured. "), "Means are over what is there:"), listing(items)
    )


def _is_told(gap: str, found: Comparison) -> bool:
    """Whether a gap of a method stands among those of the whole, under its name."""
    return any(told.endswith(f": {gap}") for told in found.gaps)


def _rows(found: Comparison, value: Callable[[Method], Estimate | None]) -> list[Row]:
    """A row per method, the highest first and gaps last."""
    rows = [Row(method.name, value(method), method.baseline) for method in found.methods]
    return sorted(rows, key=lambda row: (row.estimate is None, -(row.estimate.mean if row.estimate else 0.0)))


def _side_by_side(
    found: Comparison,
    titles: dict[str, str],
    value: Callable[[Method, str], Estimate | None],
    *,
    x_label: str,
    reference: float | None = None,
    others_only: bool = False,
) -> Html:
    """A chart per key of ``titles``, all on one scale; ``reference`` null: the baseline's own value."""
    rows = {key: _rows(found, lambda method, k=key: value(method, k)) for key in titles}  # type: ignore[misc]
    if others_only:
        rows = {key: [row for row in some if not row.marked] for key, some in rows.items()}
    drawn = []
    for key, title in titles.items():
        standard = None if found.standard is None else value(found.standard, key)
        line = reference if reference is not None or standard is None else standard.mean
        beside = [row for other in rows.values() for row in other]
        chart = whisker_chart(title, rows[key], x_label=x_label, reference=line, beside=beside, signed=others_only)
        drawn.append(chart)
    return charts(*drawn)


def _taus(found: Comparison) -> Html:
    titles = {decoding: f"tau, {decoding}" for decoding in found.decodings}
    return _side_by_side(found, titles, Method.tau, x_label="tokens per round")


def _differences_of_tau(found: Comparison) -> Html | None:
    if found.baseline is None:
        return None
    titles = {decoding: f"tau less the baseline's, {decoding}" for decoding in found.decodings}
    drawn = _side_by_side(found, titles, Method.paired, x_label="tokens per round", reference=0.0, others_only=True)
    text = paragraph(
        f"Each method against {found.baseline} on the same prompts with the same seeds. Where the bar crosses zero, "
        "the measurement does not tell the two apart."
    )
    return section("Against the baseline", text, drawn)


def _training(found: Comparison) -> Html:
    drawn = []
    for decoding in found.decodings:
        pairs = [(method, method.figure("cpu_s"), method.tau(decoding)) for method in found.methods]
        points = [Point(m.name, cost.mean, tau.mean, m.baseline) for m, cost, tau in pairs if cost and tau]
        missing = [m.name for m, cost, tau in pairs if not (cost and tau)]
        note = f"Not shown, for a value is missing: {', '.join(missing)}." if missing else None
        title = f"tau against the cost of training, {decoding}"
        drawn.append(scatter_chart(title, points, x_label="CPU-seconds of training", y_label="tau", note=note))
    text = paragraph("A name that would cover another is left out: point at the dot, or see the table.")
    return section("What training cost", text, charts(*drawn))


def _speed(found: Comparison) -> Html:
    if not found.batches:
        return section("Speed", tag("p", "No speed was measured.", class_="gap"))
    drawn = _side_by_side(
        found,
        {batch: f"speed-up at batch {batch}" for batch in found.batches},
        lambda method, batch: method.speed(batch, "speed_up"),
        x_label="times plain decoding, tokens per second",
        reference=1.0,
    )
    few = _speed_prompts(found.protocol)
    text = paragraph(
        "Wall-clock speed over plain decoding by the same loop on this machine, the two taking turns. "
        f"It is measured on {few}, so small differences mean nothing; bars go from the smallest seed to the largest. "
        "At batch 1 the machine has room to judge drafts beside each other; a batch uses that room itself, so the gain "
        "shrinks as the batch grows."
    )
    return section("Speed", text, drawn, speeds(found))


def _speed_prompts(protocol: Mapping[str, Any]) -> str:
    speed = protocol.get("speed")
    count = speed.get("prompts") if isinstance(speed, Mapping) else protocol.get("speed_prompts")
    return f"{count} prompts only" if isinstance(count, int) else "a few prompts only"


def _correlation(decoding: str, told: Any) -> Html | None:
    """How well the order of runs by expected tau is that by decoded tau."""
    rho = known(told.get("rho")) if isinstance(told, Mapping) else None
    if rho is None:
        return None
    return paragraph(
        f"Rank correlation of expected with decoded tau, {decoding}: {fixed(rho)} over {told.get('n')} runs."
    )


def _words(found: Comparison) -> Html | None:
    """What differs between the recipes."""
    if not found.differences:
        return None
    items = [[tag("b", name), ": ", "; ".join(said) if said else _NO_WORDS] for name, said in found.differences.items()]
    against = "" if found.baseline is None else f" from {found.baseline}"
    return section("What differs", paragraph(f"In which settings each recipe differs{against}:"), listing(items))


def _flat(tree: Any, where: str = "") -> list[tuple[Child, Child]]:
    """``key.key`` and value of every leaf."""
    if isinstance(tree, Mapping) and tree:
        return [row for key, value in tree.items() for row in _flat(value, f"{where}.{key}" if where else str(key))]
    if isinstance(tree, Mapping):
        return []
    shown = ", ".join(map(str, tree)) if isinstance(tree, list) else str(tree)
    return [(where, tag("code", shown))]
