"""Whether runs can be compared: of one target, trained on the same rows, measured in the same way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dflash_lightning.bench.differences import differences
from dflash_lightning.bench.runs import Run
from dflash_lightning.recipe.arguments import source_defaults

_DEFAULTS = source_defaults("dflash_lightning.decoding.settings.DecodingSettings")  # read as text: no torch
_SHOWN = 12  # characters of a digest


def unlike(runs: Sequence[Run]) -> list[str]:
    """What differs between measured runs that must not, a line each: target, rows, prompts, decoding.

    A way to decode that only some were measured with is no difference: others have a gap there.
    """
    lines: dict[str, None] = {}
    first = runs[0]
    for run in runs[1:]:
        for what, mine, theirs in _unlike(_facts(first), _facts(run)):
            lines.setdefault(f"{what}: {_short(mine)} ({first.where}), {_short(theirs)} ({run.where})")
    seen: dict[str, str] = {}  # one run for each thing that differs is enough
    for line in lines:
        seen.setdefault(line.partition(":")[0], line)
    return list(seen.values())


def _facts(run: Run) -> dict[str, Any]:
    assert run.measured is not None
    facts = {"target": run.measured["target"].get("digest") or run.measured["target"], **run.measured["protocol"]}
    if isinstance(ways := facts.get("decodings"), dict):
        # A setting that came later than a run had its default there.
        facts["decodings"] = {name: _DEFAULTS | way if isinstance(way, dict) else way for name, way in ways.items()}
    return facts


def _unlike(mine: dict[str, Any], theirs: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in sorted({*mine, *theirs}):
        ours, others = mine.get(key), theirs.get(key)
        if key in ("prompts", "decodings") and isinstance(ours, dict) and isinstance(others, dict):
            names = {*ours, *others} if key == "prompts" else ours.keys() & others.keys()
            for name in sorted(names):
                if ours.get(name) != others.get(name):
                    yield f"{key}.{name}", ours.get(name), others.get(name)
        elif ours != others:
            yield key, ours, others


def _short(value: Any) -> str:
    text = str(value)
    return text[:_SHOWN] if len(text) == 64 and " " not in text else text


def check_one_recipe(runs: Sequence[Run]) -> list[str]:
    """What differs between the recipes of runs that go by one name: figures over them are no mean over seeds."""
    return [
        f"{run.method.name}: {line} ({run.where} against {runs[0].where})"
        for run in runs[1:]
        for line in differences(run.recipe, runs[0].recipe)
    ]


def speed_notes(runs: Sequence[Run]) -> list[str]:
    """What makes speeds of these runs doubtful beside one another."""
    found = []
    for key, what in (("cpu", "processors"), ("threads", "numbers of threads"), ("gpu", "GPUs")):
        values = list(dict.fromkeys(str(((run.measured or {}).get("machine") or {}).get(key)) for run in runs))
        if len(values) > 1:
            found.append(f"speed: timed on different {what} ({', '.join(values)})")
    return found
