"""The measured runs behind the words of ``dflash compare``: folders, folders of them, and files that it wrote."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_lightning.bench.held import measured_faults
from dflash_lightning.bench.method import Method, short_name
from dflash_lightning.bench.plan import PLAN, Plan
from dflash_lightning.bench.record import MEASURED_FILE, drafter_digest, read_measured
from dflash_lightning.bench.summary import tau_of
from dflash_lightning.files import RECIPE_FILE, STATE_FILE
from dflash_lightning.run import RunFolder, read_recipe

_ASIDE = re.compile(r"\.old-\d+$")  # what dflash fit --fresh leaves of an earlier run


@dataclass(frozen=True)
class Run:
    """A run of a method and a seed. ``measured`` is null where it has no figures, and ``gap`` says why.

    ``measured`` is the content of ``measured.json``; in one that ``compare`` wrote, ``prompts`` hold no counts by slot,
    and ``slots`` has their sums by decoding.
    """

    where: str
    method: Method
    seed: int | None
    recipe: dict[str, Any]
    measured: dict[str, Any] | None = None
    gap: str = ""

    def rows(self, decoding: str) -> list[dict[str, Any]]:
        """Rows of ``prompts`` of one decoding."""
        assert self.measured is not None
        return [row for row in self.measured["prompts"] if row["decoding"] == decoding]

    def tau(self, decoding: str) -> float:
        """Pooled over all prompts."""
        return tau_of(self.rows(decoding))

    @property
    def decodings(self) -> list[str]:
        """Names of the ways in which it was decoded."""
        assert self.measured is not None
        return list(dict.fromkeys(row["decoding"] for row in self.measured["prompts"]))


def find_runs(words: Sequence[str]) -> list[Run]:
    """All runs that are meant, those without figures too, in the order of the words.

    Raises:
        ValueError: a word names nothing of the kind; a file is damaged; a method has two runs of one seed.
    """
    runs: dict[str, Run] = {}
    for word in words:
        for run in _of_word(word):
            runs.setdefault(run.where, run)
    _check_once(list(runs.values()))
    return list(runs.values())


def check_measured(runs: Sequence[Run]) -> list[Run]:
    """The runs that have figures.

    Raises:
        ValueError: none has; says of each why.
    """
    measured = [run for run in runs if run.measured is not None]
    if not measured:
        gaps = [f"  - {run.where}: {run.gap}" for run in runs]
        raise ValueError("\n".join(["RUN: nothing is measured, so there is nothing to compare:", *gaps]))
    return measured


def _check_once(runs: list[Run]) -> None:
    seen: dict[tuple[Method, int | None], Run] = {}
    for run in runs:
        first = seen.setdefault((run.method, run.seed), run)
        if first is not run:
            raise ValueError(
                f"RUN: {first.where} and {run.where} are both of {run.method.name}, seed {run.seed}, and would count "
                "twice. Give one of them."
            )


def _of_word(word: str) -> Iterator[Run]:
    place = Path(word).expanduser()
    if place.is_file():
        yield from _of_file(place)
    elif (place / RECIPE_FILE).exists():
        yield _of_folder(place)
    elif place.is_dir():
        found = [*_below(place)]
        if not found:
            raise ValueError(f"RUN: {word} holds no runs. Give run folders, a folder of them, or a file of --json.")
        yield from found
    else:
        raise ValueError(f"RUN: there is no {word}. Give run folders, a folder of them, or a file of --json.")


def _below(folder: Path) -> Iterator[Run]:
    """The runs below a folder, and the points of sweeps there that have no folder yet."""
    known, walked = set(), set()
    for root, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not _ASIDE.search(name))
        place = Path(root)
        if place.resolve() in walked:  # by a link that leads back, or by two
            folders[:] = []
            continue
        walked.add(place.resolve())
        if RECIPE_FILE in files and STATE_FILE in files:
            folders[:] = []
            known.add(place.resolve())
            yield _of_folder(place)
        elif PLAN in folders:
            folders.remove(PLAN)
    for plan in [Plan(path.parent) for path in sorted(folder.rglob(PLAN)) if path.is_dir()]:
        for name, told in plan.read().items():
            if (plan.folder / name).resolve() not in known:
                method = Method(short_name(told["recipe"]), tuple(told["overrides"]))
                yield Run(str(plan.folder / name), method, told["seed"], {}, gap="not begun")


def _of_folder(place: Path) -> Run:
    folder = RunFolder(place)
    state, recipe = folder.state, read_recipe(folder.recipe)
    method, seed, file = Method.of_run(state, recipe), recipe.get("seed"), place / MEASURED_FILE
    if not folder.finished:
        return Run(str(place), method, seed, recipe, gap=f"not finished (dflash fit {place})")
    if not file.exists():
        return Run(str(place), method, seed, recipe, gap=f"no {MEASURED_FILE} ({_to_measure(place, recipe)})")
    measured = read_measured(file)
    if measured["drafter_sha256"] != drafter_digest(place):
        return Run(str(place), method, seed, recipe, gap=f"measured with other weights ({_to_measure(place, recipe)})")
    return Run(str(place), method, seed, recipe, measured)


def _to_measure(place: Path, recipe: dict[str, Any]) -> str:
    """The command that measures a run; a recipe that names nothing to measure is measured on the bench's prompts."""
    return f"dflash measure {place}{'' if recipe.get('measure') else ' measure=bench'}"


# -- the file of a comparison -----------------------------------------------------------------------------------------


def _of_file(file: Path) -> Iterator[Run]:
    advice = "Give one that it wrote, or run folders"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: is not a file of dflash compare --json ({error}). {advice}.") from error
    if not isinstance(found, dict) or not isinstance(found.get("runs"), list):
        raise ValueError(f"{file}: holds no runs of a comparison. {advice}.")
    for told in found["runs"]:
        try:
            run = Run(**{**told, "method": Method(told["method"][0], tuple(told["method"][1:]))})
            if wrong := [key for key, kind in _TOLD.items() if not isinstance(told.get(key), kind)]:
                raise TypeError(f"{', '.join(wrong)} is missing or of another kind")
        except (TypeError, KeyError, IndexError) as error:
            raise ValueError(f"{file}: damaged ({error}). {advice}.") from error
        if run.measured is not None and (wrong := measured_faults(run.measured)):
            raise ValueError(f"{file}: damaged (of {run.where}: {', '.join(wrong)}). {advice}.")
        yield run


def told_run(run: Run) -> dict[str, Any]:
    """A run as plain values for a comparison's file; counts by slot are summed over the prompts."""
    measured = run.measured
    if measured is not None:
        rows = [
            {key: value for key, value in row.items() if not key.endswith("_by_slot")} for row in measured["prompts"]
        ]
        slots = {decoding: dict(zip(_SLOTS, slot_sums(run, decoding), strict=True)) for decoding in run.decodings}
        measured = {**measured, "prompts": rows, "slots": slots}
    return {
        "where": run.where,
        "method": [run.method.recipe, *run.method.overrides],
        "seed": run.seed,
        "recipe": run.recipe,
        "measured": measured,
        "gap": run.gap,
    }


_SLOTS = ("drafted", "accepted")
_TOLD: dict[str, Any] = {"where": str, "method": list, "seed": (int, type(None)), "recipe": dict, "gap": str}


def slot_sums(run: Run, decoding: str) -> tuple[list[int], list[int]]:
    """Over the prompts: rounds that reached each slot with a draft there, and those in which it stood."""
    assert run.measured is not None
    if (told := run.measured.get("slots")) is not None:
        return told[decoding]["drafted"], told[decoding]["accepted"]
    rows = run.rows(decoding)
    drafted, accepted = ([row[f"{name}_by_slot"] for row in rows] for name in _SLOTS)
    return [sum(column) for column in zip(*drafted, strict=True)], [
        sum(column) for column in zip(*accepted, strict=True)
    ]
