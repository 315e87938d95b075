"""The page of ``dflash report --html``: one run's drafter, measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_lightning.pages.answers import answers
from dflash_lightning.pages.charts import (
    NUM_COLOURS,
    Bar,
    Parts,
    Series,
    bar_chart,
    line_chart,
    no_figure,
    parts_chart,
    share_text,
)
from dflash_lightning.pages.markup import Child, Html, tag
from dflash_lightning.pages.numbers import fixed, gap, known
from dflash_lightning.pages.page import charts, facts, listing, page, paragraph, section, tile, warning

_NO_ROUND = "No round was drafted: every answer was a single token."
_NO_HISTORY = "This run measured nothing while it trained (its recipe has no callbacks.speculative_eval)."
_DECODERS = {
    "speculative": "with drafts",
    "autoregressive": "without drafts",
    "transformers_generate": "generate()",
}
_NO_SPEED = "Not measured. Ask for it with --batch-sizes 1,2,4,8."


def report_page(report: Mapping[str, Any]) -> str:
    """The whole page.

    ``report`` is what ``dflash report`` wrote, with ``run`` (the folder), ``checkpoint``, ``settings`` (by dotted key)
    and ``history`` (the figures of the run's own evaluations, each with its ``step``). What is missing is shown as
    missing.
    """
    sections = [
        _warnings(report),
        _tiles(report),
        section(
            "Acceptance",
            _acceptance_text(report),
            charts(_learning(report), _slots(report), _survival(report), _histogram(report)),
        ),
        section(
            "Speed", _speed_text(report), charts(_per_token(report), _round(report), _gain(report), _batches(report))
        ),
        answers(report.get("answers")),
        _settings(report),
    ]
    return page(f"Drafter of {_run_name(report)}", _lead(report), sections)


def _run_name(report: Mapping[str, Any]) -> str:
    name = (report.get("settings") or {}).get("name")
    return str(name or report.get("run") or "a run")


def _lead(report: Mapping[str, Any]) -> Html:
    note = f", {report['note']}" if report.get("note") else ""
    return paragraph(
        f"{report.get('checkpoint')} of {report.get('run')}, for {report.get('target')}. "
        f"Measured on {report.get('prompts')} prompts{note} ({report.get('prompts_file')}), "
        f"answers of up to {report.get('max_new_tokens')} tokens."
    )


def _warnings(report: Mapping[str, Any]) -> Html | None:
    said: list[Child] = [str(text).removeprefix("warning: ") for text in report.get("warnings") or []]
    if report.get("verdict") == "NO":
        said.append("Output is not the target's own: the figures are worth nothing.")
    if report.get("finished") is False:
        said.append("The run is not finished: these are figures of what it has trained so far.")
    if other := report.get("other_target"):
        said.append(f"Measured on another target than its own: made for {other['made_for']}.")
    return warning(tag("b", "Before you read on"), listing(said)) if said else None


# -- what is read first -----------------------------------------------------------------------------------------------


def _tiles(report: Mapping[str, Any]) -> Html:
    tau, interval = known(report.get("tau")), report.get("tau_interval")
    ends = f"95 %: {fixed(interval[0])} to {fixed(interval[1])}, over prompts of the kind" if interval else None
    degenerate = f"{report.get('looped_answers')} / {report.get('cut_answers')}"
    without = known(report.get("tau_without_loops"))
    beside = f"of {report.get('prompts')}" + (
        f"; tau {fixed(without)} without those that repeat"
        if without is not None and report.get("looped_answers")
        else ""
    )
    gain, few = known(report.get("speedup_over_autoregressive")), report.get("timed_prompts")
    return tag(
        "div",
        tile(gap(_NO_ROUND) if tau is None else fixed(tau), "tokens per round (tau)", ends),
        tile(str(report.get("verdict")), "lossless", f"{report.get('identical_to_transformers_generate')} identical"),
        tile(
            gap(_NO_ROUND) if gain is None else f"{fixed(gain)}x",
            "speed-up at batch 1",
            f"over the same loop without drafts, on {few} prompts only{_at_largest(report)}",
        ),
        tile(degenerate, "answers that repeat themselves / are cut at the limit", beside),
        class_="tiles",
    )


def _at_largest(report: Mapping[str, Any]) -> str:
    """The gain at the largest batch, which stands wherever that at batch 1 does."""
    gains = _gains(report)
    if not gains or gains[-1][0] == 1:
        return "; not measured in batches"
    batch, gain = gains[-1]
    return f"; {fixed(gain)}x at batch {batch:g}"


# -- acceptance -------------------------------------------------------------------------------------------------------


def _acceptance_text(report: Mapping[str, Any]) -> Html:
    decoding = report.get("decoding") or {}
    return paragraph(
        f"{decoding.get('committed')} tokens in {decoding.get('rounds')} rounds. A round adds the drafts that the "
        "target agrees with, and one token of the target's own."
    )


def _learning(report: Mapping[str, Any]) -> Html:
    title, entries = "Learning curve of tau", report.get("history") or []
    decoded = [(entry["step"], known(entry.get("decode/tau"))) for entry in entries]
    predicted = [(entry["step"], known(entry.get("decode/expected_tau"))) for entry in entries]
    if not any(tau is not None for _, tau in decoded):
        return no_figure(title, _NO_HISTORY)
    series = [Series("decoded", decoded)]
    if any(tau is not None for _, tau in predicted):
        series.append(Series("expected, without decoding", predicted, colour=3, dashed=True))
    note = "By the run's own evaluations, on its own prompts and with its own settings of decoding."
    return line_chart(title, series, x_label="optimizer steps", y_label="tau", note=note)


def _slots(report: Mapping[str, Any]) -> Html:
    """Survival of the first slots as the run goes on."""
    title, entries = "Survival by slot while training", report.get("history") or []
    lines = [
        Series(f"slot {slot}", [(e["step"], known(e.get(f"decode/survival/slot_{slot}"))) for e in entries], slot)
        for slot in range(1, NUM_COLOURS + 1)
    ]
    lines = [line for line in lines if any(share is not None for _, share in line.points)]
    if not lines:
        return no_figure(title, _NO_HISTORY)
    return line_chart(title, lines, x_label="optimizer steps", y_label="share of rounds", zero=True)


def _survival(report: Mapping[str, Any]) -> Html:
    title, decoding = "Survival by slot", report.get("decoding") or {}
    survival = _by_slot(decoding.get("survival"))
    if not any(share is not None for _, share in survival):
        return no_figure(title, _NO_ROUND)
    lines = [
        Series("all drafts up to here stand", survival),
        Series("this one stands, if those before it do", _by_slot(decoding.get("conditional_acceptance")), 3, True),
    ]
    slots = [slot for slot, _ in survival]
    return line_chart(title, lines, x_label="slot", y_label="share of rounds", x_ticks=slots, zero=True, top=1.0)


def _by_slot(shares: Sequence[Any] | None) -> list[tuple[float, float | None]]:
    return [(float(slot), known(share)) for slot, share in enumerate(shares or [], start=1)]


def _histogram(report: Mapping[str, Any]) -> Html:
    title, decoding = "Tokens added by a round", report.get("decoding") or {}
    counts = decoding.get("histogram") or []
    total = sum(counts)
    if not total:
        return no_figure(title, _NO_ROUND)
    last = len(counts) - 1
    bars = [
        Bar(str(n + 1), 100 * count / total, share_text(count / total), marked=n == last)
        for n, count in enumerate(counts)
    ]
    whole = known(decoding.get("rounds")) or total
    cut = f" {whole - total:g} rounds that were cut short are left out." if whole > total else ""
    note = (
        f"The last bar is the ceiling: every draft of the block stood in {share_text(counts[-1] / total)} of rounds, "
        f"and a longer block might have added more.{cut}"
    )
    return bar_chart(title, bars, x_label="tokens", y_label="% of rounds", note=note)


# -- speed ------------------------------------------------------------------------------------------------------------


def _speed_text(report: Mapping[str, Any]) -> Html:
    machine = report.get("machine") or {}
    device = str(report.get("device"))
    used = f"{machine.get('cpu')}, threads: {machine.get('threads')}" if device == "cpu" else machine.get("gpu")
    return paragraph(
        f"Wall-clock time on {used}, {report.get('dtype')}. The speed-up at batch 1 is of "
        f"{report.get('timed_prompts')} prompts, decoded one at a time with and without drafts in turns. At batch 1 a "
        "machine has room to judge drafts beside each other; a batch uses that room itself, so the gain shrinks as the "
        "batch grows."
    )


def _per_token(report: Mapping[str, Any]) -> Html:
    title, seconds = "Time of a token at batch 1", report.get("s_per_token") or {}
    rows = [Parts(name, [1e3 * s]) for key, name in _DECODERS.items() if (s := known(seconds.get(key))) is not None]
    if not rows:
        return no_figure(title, _NO_ROUND)
    note = f"On {report.get('timed_prompts')} prompts only, prefill included. The drafter's gain is over the second."
    return parts_chart(title, ["wall"], rows, x_label="ms per token", unit="ms", note=note)


def _round(report: Mapping[str, Any]) -> Html:
    title, decoding = "Where the time of a round goes", report.get("decoding") or {}
    rows = [] if _stages(decoding)[0] is None else [Parts("timed, batch 1", _stages(decoding))]
    for entry in report.get("speed") or []:
        rows.append(Parts(f"batch {entry['batch']}", _stages(entry)))
    plain = known((report.get("s_per_token") or {}).get("autoregressive"))
    if not rows:
        return no_figure(title, _NO_ROUND)
    note = "Host: committing, counting, cutting." + (
        f" One token without drafts takes {fixed(1e3 * plain, 1)} ms at batch 1." if plain is not None else ""
    )
    return parts_chart(
        title, ["draft", "verify", "host"], rows, x_label="ms per round of the batch", unit="ms", note=note
    )


def _stages(figures: Mapping[str, Any]) -> list[float | None]:
    """Milliseconds of drafting, judging, and all else that the host does."""
    draft, verify, commit, host = (known(figures.get(f"{stage}_ms")) for stage in ("draft", "verify", "commit", "host"))
    return [draft, verify, host if commit is None or host is None else commit + host]


def _batches(report: Mapping[str, Any]) -> Html:
    title, entries = "Speed against batch size", report.get("speed") or []
    if not entries:
        return no_figure(title, _NO_SPEED)
    drafted = [(float(e["batch"]), known(e.get("tokens_per_s"))) for e in entries]
    plain = [(float(e["batch"]), known(e.get("plain_tokens_per_s"))) for e in entries]
    lines = [Series("with drafts", drafted), Series("without", plain, colour=2, dashed=True)]
    sizes = [batch for batch, _ in drafted]
    return line_chart(
        title, lines, x_label="batch size", y_label="tokens/s", x_ticks=sizes, zero=True, note=_few(report)
    )


def _gain(report: Mapping[str, Any]) -> Html:
    title, gains = "Speed-up against batch size", _gains(report)
    if not gains:
        return no_figure(title, _NO_SPEED)
    lines = [
        Series("with drafts", gains),
        Series("without drafts", [(gains[0][0], 1.0), (gains[-1][0], 1.0)], colour=2, dashed=True),
    ]
    sizes = [batch for batch, _ in gains]
    return line_chart(title, lines, x_label="batch size", y_label="times", x_ticks=sizes, zero=True, note=_few(report))


def _gains(report: Mapping[str, Any]) -> list[tuple[float, float]]:
    pairs = [
        (float(e["batch"]), known(e.get("tokens_per_s")), known(e.get("plain_tokens_per_s")))
        for e in report.get("speed") or []
    ]
    return [(batch, drafted / plain) for batch, drafted, plain in pairs if drafted is not None and plain]


def _few(report: Mapping[str, Any]) -> Child:
    entry = (report.get("speed") or [{}])[0]
    missing = "".join(f" Missing: {text}." for text in report.get("speed_gaps") or [])
    return f"{entry.get('prompts')} prompts at every size, prefill included; rows that have ended ride along.{missing}"


# -- settings ---------------------------------------------------------------------------------------------------------


def _settings(report: Mapping[str, Any]) -> Html:
    machine = {**(report.get("machine") or {}), "device": report.get("device"), "dtype": report.get("dtype")}
    minutes = {
        "minutes of training": report.get("train_minutes"),
        "minutes of evaluation": report.get("evaluation_minutes"),
    }
    asked = (report.get("asked") or {}).get("decoding") or {}
    return section(
        "Settings and versions",
        _folded("Recipe of the run", report.get("settings")),
        _folded("Decoding of this report", asked),
        _folded("Versions", report.get("versions")),
        _folded("Machine and time", {**machine, **minutes}),
    )


def _folded(title: str, values: Mapping[str, Any] | None) -> Html:
    if not values:
        return tag("p", f"{title}: nothing is known.", class_="gap")
    return facts([(key, tag("code", _setting(value))) for key, value in values.items()], title=title)


def _setting(value: Any) -> str:
    if value is None:
        return "null"
    return fixed(value, 1) if isinstance(value, float) and value > 1 else str(value)
