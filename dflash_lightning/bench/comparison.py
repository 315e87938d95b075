"""Measured runs side by side: means over seeds, differences on the same prompts and seeds, and what is missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dflash_lightning.bench.alike import check_one_recipe, speed_notes, unlike
from dflash_lightning.bench.bootstrap import Counts, difference_estimate, estimate, rank_correlation, tau_estimate
from dflash_lightning.bench.differences import differences
from dflash_lightning.bench.method import common_overrides
from dflash_lightning.bench.runs import Run, check_measured, slot_sums, told_run
from dflash_lightning.decoding.stats import DecodeStats
from dflash_lightning.recipe.faults import hint_for

VERSION = 1
_USUAL = ("bench/dflash", "dflash")  # the baseline where none is named
_STAGES = ("draft_ms", "verify_ms", "commit_ms", "host_ms")
_INTERVALS = (
    "low and high: for tau and paired the 95 % bootstrap interval over prompts (drawn within their domains) and seeds; "
    "elsewhere the smallest and the largest seed"
)


def compare_runs(runs: Sequence[Run], *, baseline: str | None = None, mixed: bool = False) -> dict[str, Any]:
    """The figures of ``dflash compare --json``: see the keys there.

    Raises:
        ValueError: no run has figures; runs of different targets, data or protocols, or of one name and different
            recipes, and not ``mixed``; no method is called ``baseline``.
    """
    measured = check_measured(runs)
    common = common_overrides([run.method for run in runs])
    methods: dict[str, list[Run]] = {}
    for run in runs:
        methods.setdefault(run.method.name_without(common), []).append(run)
    gaps = _refused(measured, methods, mixed) + speed_notes(measured)
    first = _baseline(baseline, methods)
    base = _measured(methods[first])
    seeds = sorted({run.seed for run in runs}, key=str)
    told = [_method(name, some, seeds, base, is_baseline=name == first) for name, some in methods.items()]
    return {
        "version": VERSION,
        "baseline": first,
        "common_overrides": common,
        "target": (base or measured)[0].measured["target"],  # type: ignore[index]
        "protocol": (base or measured)[0].measured["protocol"],  # type: ignore[index]
        "intervals": _INTERVALS,
        "differences": _differences(methods, first),
        "methods": told,
        "rank_correlation": _correlations(measured),
        "machine": (base or measured)[0].measured.get("machine"),  # type: ignore[index,union-attr]
        "gaps": gaps + [f"{one['name']}: {gap}" for one in told for gap in one["gaps"]],
        "runs": [told_run(run) for run in runs],
    }


def _measured(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.measured is not None]


def _refused(measured: list[Run], methods: dict[str, list[Run]], mixed: bool) -> list[str]:
    """What differs and must not, as notes where that is asked for.

    Raises:
        ValueError: it is not.
    """
    found = unlike(measured)
    for runs in methods.values():
        found += check_one_recipe([run for run in runs if run.recipe])
    if found and not mixed:
        lines = "\n".join(f"  - {line}" for line in found)
        raise ValueError(
            f"RUN: these runs are not alike, so their figures say nothing of the methods:\n{lines}\n"
            "Compare those that are, measure them alike (dflash measure), or say --mixed."
        )
    return [f"mixed: {line}" for line in found]


def _baseline(asked: str | None, methods: dict[str, list[Run]]) -> str:
    if asked is not None and asked not in methods:
        raise ValueError(f"--baseline: no method is called {asked!r}. {hint_for(asked, methods)}.")
    with_figures = [name for name, runs in methods.items() if _measured(runs)]
    return asked or next((name for name in _USUAL if name in with_figures), with_figures[0])


def _differences(methods: dict[str, list[Run]], baseline: str) -> dict[str, list[str]]:
    """What a method's recipe has otherwise than the baseline's."""
    recipes = {name: next((run.recipe for run in runs if run.recipe), None) for name, runs in methods.items()}
    theirs = recipes[baseline] or {}
    return {
        name: differences(recipe, theirs) for name, recipe in recipes.items() if name != baseline and recipe is not None
    }


# -- one method -------------------------------------------------------------------------------------------------------


def _method(
    name: str, runs: list[Run], seeds: Sequence[int | None], base: list[Run], *, is_baseline: bool
) -> dict[str, Any]:
    """The figures of a method over its seeds."""
    good = _measured(runs)
    gaps = [f"seed {run.seed}: {run.gap}" for run in runs if run.measured is None]
    gaps += [f"seed {seed}: no run" for seed in seeds if seed not in {run.seed for run in runs}]
    decodings = list(dict.fromkeys(decoding for run in good for decoding in run.decodings))
    tau, paired = {}, {}
    for decoding in decodings:
        having = [run for run in good if decoding in run.decodings]
        gaps += [f"seed {run.seed}: not decoded with {decoding}" for run in good if run not in having]
        if len({frozenset(_by_key(run, decoding)) for run in having}) > 1:
            gaps.append(f"{decoding}: some seeds lack prompts, so tau is over those that all have")
        tau[decoding] = _taus(having, decoding)
        paired[decoding] = None if is_baseline else _paired(having, base, decoding, gaps)
    rows = [row for run in good for row in _rows(run)]
    return {
        "name": name,
        "seeds": [run.seed for run in good],
        "tau": tau,
        "paired": paired,
        "speed": _speeds(good),
        **{key: _over(good, lambda run, key=key: run["training"].get(key)) for key in ("loss", "cpu_s", "wall_s")},
        "steps": _first(good, "steps"),
        "parameters": _first(good, "parameters"),
        "rows": _first(good, "rows"),
        "expected_tau": _expected(good),
        "degenerate": {
            "repetitive": sum(row["repetitive"] for row in rows),
            "cut": sum(row["finish"] == "length" for row in rows),
            "of": len(rows),
        },
        "identical": [sum(_identical(run)[key] for run in good) for key in ("identical", "compared")],
        "survival": _survival(good, decodings[0]) if decodings else [],
        "gaps": gaps,
    }


def _rows(run: Run) -> list[dict[str, Any]]:
    assert run.measured is not None
    return list(run.measured["prompts"])


def _identical(run: Run) -> dict[str, int]:
    assert run.measured is not None
    return dict(run.measured["identical"])


def _first(runs: list[Run], key: str) -> Any:
    """A figure of training that is the same for all seeds: that of the first."""
    return None if not runs or runs[0].measured is None else runs[0].measured["training"].get(key)


def _over(runs: list[Run], figure: Callable[..., float | None]) -> dict[str, Any] | None:
    """An estimate over the runs that have the figure; null where none has."""
    values = [value for run in runs if (value := figure(run.measured)) is not None and math.isfinite(value)]
    return estimate(values) if values else None


def _keys(runs: Sequence[Run], decoding: str) -> list[tuple[str, int]]:
    """The prompts that all of the runs have, in the order of the first."""
    rows = [{(row["domain"], row["index"]): None for row in run.rows(decoding)} for run in runs]
    return [key for key in rows[0] if all(key in others for others in rows[1:])]


def _counts(runs: Sequence[Run], decoding: str, keys: Sequence[tuple[str, int]]) -> Counts:
    found = {
        name: torch.tensor(
            [[by_key[key][name] for key in keys] for run in runs for by_key in [_by_key(run, decoding)]],
            dtype=torch.float64,
        )
        for name in ("committed", "rounds")
    }
    return Counts(found["committed"], found["rounds"])


def _by_key(run: Run, decoding: str) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row["domain"], row["index"]): row for row in run.rows(decoding)}


def _taus(runs: list[Run], decoding: str) -> dict[str, Any]:
    """``all`` and every domain."""
    keys = _keys(runs, decoding)
    counts, domains = _counts(runs, decoding, keys), [domain for domain, _ in keys]
    found = {"all": tau_estimate(counts, domains)}
    for domain in dict.fromkeys(domains):
        places = [i for i, name in enumerate(domains) if name == domain]
        found[domain] = tau_estimate(counts.of(places), [domain] * len(places))
    return found


def _paired(runs: list[Run], base: list[Run], decoding: str, gaps: list[str]) -> dict[str, Any] | None:
    """The difference to the baseline over the seeds that both have; null without one, or without common prompts."""
    theirs = {run.seed: run for run in base if decoding in run.decodings}
    pairs = [(run, theirs[run.seed]) for run in runs if run.seed in theirs]
    if not pairs:
        gaps.append(f"{decoding}: no seed in common with the baseline")
        return None
    if len(pairs) < len(runs):
        left = [str(run.seed) for run in runs if run.seed not in theirs]
        gaps.append(f"{decoding}: the difference leaves out seeds that the baseline lacks ({', '.join(left)})")
    if any(_prompts(mine) != _prompts(other) for mine, other in pairs):
        gaps.append(f"{decoding}: measured on other prompts than the baseline, so there is no difference")
        return None
    mine, others = [mine for mine, _ in pairs], [other for _, other in pairs]
    keys = _keys([*mine, *others], decoding)
    domains = [domain for domain, _ in keys]
    return difference_estimate(_counts(mine, decoding, keys), _counts(others, decoding, keys), domains)


def _prompts(run: Run) -> Any:
    assert run.measured is not None
    return run.measured["protocol"].get("prompts")


def _speeds(runs: list[Run]) -> dict[str, Any]:
    """By batch size, as text: JSON has no other keys."""
    batches = sorted({row["batch"] for run in runs for row in (run.measured or {})["speed"]})
    found = {}
    for batch in batches:

        def figure(measured: dict[str, Any], name: str, batch: int = batch) -> float | None:
            row = next((row for row in measured["speed"] if row["batch"] == batch), None)
            if row is None:
                return None
            if name == "speed_up":
                mine, plain = row["tokens_per_s"], row["plain_tokens_per_s"]
                return mine / plain if mine and plain else None
            return row.get(name)

        names = ("tokens_per_s", "plain_tokens_per_s", "speed_up", *_STAGES)
        found[str(batch)] = {name: _over(runs, lambda run, name=name: figure(run, name)) for name in names}
    return found


def _survival(runs: list[Run], decoding: str) -> list[float]:
    """Share of rounds whose drafts stand up to each slot, over all prompts and seeds."""
    sums = [slot_sums(run, decoding) for run in runs if decoding in run.decodings]
    if len({len(drafted) for drafted, _ in sums}) != 1:
        return []
    drafted, stood = ([sum(column) for column in zip(*part, strict=True)] for part in zip(*sums, strict=True))
    return DecodeStats(len(drafted), at_risk=drafted, stood=stood).survival


# -- acceptance without decoding --------------------------------------------------------------------------------------


def _expected(runs: list[Run]) -> dict[str, Any] | None:
    """``expected_tau`` over seeds, by decoding and domain; null where no run has it."""
    told = [run.measured["expected_tau"] for run in runs if run.measured and run.measured.get("expected_tau")]
    found: dict[str, dict[str, Any]] = {}
    for decoding in dict.fromkeys(name for one in told for name in one):
        having = [one[decoding] for one in told if one.get(decoding)]
        for domain in dict.fromkeys(name for one in having for name in one):
            values = [one[domain] for one in having if one.get(domain) is not None]
            if values:
                found.setdefault(decoding, {})[domain] = estimate(values)
    return found or None


def _correlations(runs: list[Run]) -> dict[str, Any]:
    """Rank correlation over runs of the tau that was expected with the one that was decoded, by decoding."""
    found = {}
    for decoding in dict.fromkeys(name for run in runs for name in run.decodings):
        pairs = [
            (expected, run.tau(decoding))
            for run in runs
            if decoding in run.decodings and (expected := _expected_of(run, decoding)) is not None
        ]
        if pairs:
            mine, decoded = zip(*pairs, strict=True)
            found[decoding] = {"rho": rank_correlation(mine, decoded), "n": len(pairs)}
    return found


def _expected_of(run: Run, decoding: str) -> float | None:
    told = (run.measured or {}).get("expected_tau") or {}
    return (told.get(decoding) or {}).get("all")
