"""What the content of a ``measured.json`` must hold, so that no figure is made of a file that was cut or edited."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

Fits: TypeAlias = Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is(kind: type) -> Fits:
    return lambda value: isinstance(value, kind)


def _or_null(fits: Fits) -> Fits:
    return lambda value: value is None or fits(value)


def _list_of(fits: Fits) -> Fits:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _mapping_of(fits: Fits) -> Fits:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


_FILE: dict[str, Fits] = {
    "drafter_sha256": _or_null(_is(str)),
    "protocol": _is(dict),
    "prompts": _list_of(_is(dict)),
    "target": _is(dict),
    "training": _is(dict),
    "speed": _list_of(_is(dict)),
    "identical": _is(dict),
}
# These may be absent too.
_MAY_HOLD: dict[str, Fits] = {
    "machine": _is(dict),
    "expected_tau": _mapping_of(_or_null(_mapping_of(_or_null(_is_number)))),
}
_PROMPT: dict[str, Fits] = {
    "domain": _is(str),
    "index": _is_count,
    "decoding": _is(str),
    "rounds": _is_number,
    "committed": _is_number,
    "finish": _is(str),
    "repetitive": _is(bool),
}
_SLOTS: dict[str, Fits] = {f"{name}_by_slot": _list_of(_is_number) for name in ("drafted", "accepted")}
_SPEED: dict[str, Fits] = {
    "batch": _is_count,
    "tokens_per_s": _or_null(_is_number),
    "plain_tokens_per_s": _or_null(_is_number),
}
_STAGES = dict.fromkeys(("draft_ms", "verify_ms", "commit_ms", "host_ms"), _is_number)
_IDENTICAL: dict[str, Fits] = dict.fromkeys(("identical", "compared"), _is_count)
_TRAINING = dict.fromkeys(("loss", "cpu_s", "wall_s", "steps", "parameters", "rows"), _is_number)


def measured_faults(found: Any) -> list[str]:
    """Keys that the content of a ``measured.json`` lacks, or whose values are of another kind."""
    if not isinstance(found, dict):
        return ["a mapping"]
    wrong = [*_missing(found, _FILE), *_other(found, _MAY_HOLD)]
    whole = "slots" not in found  # a comparison's file has sums in place of the counts by slot
    for key, faults in (("prompts", _of_prompt), ("speed", _of_speed)):
        if key not in wrong:
            wrong += sorted({f"{key}.{name}" for row in found[key] for name in faults(row, whole)})
    if "identical" not in wrong:
        wrong += [f"identical.{name}" for name in _missing(found["identical"], _IDENTICAL)]
    if "training" not in wrong:
        wrong += [f"training.{name}" for name in _other(found["training"], _TRAINING)]
    return wrong if wrong else list(_uneven(found)) if whole else list(_bad_sums(found))


def _of_prompt(row: Mapping[str, Any], whole: bool) -> Iterator[str]:
    yield from _missing(row, _PROMPT | _SLOTS if whole else _PROMPT)


def _of_speed(row: Mapping[str, Any], whole: bool) -> Iterator[str]:
    yield from _missing(row, _SPEED)
    yield from _other(row, _STAGES)


def _uneven(found: Mapping[str, Any]) -> Iterator[str]:
    """Counts by slot that are of different numbers of slots, though they are of one way to decode."""
    sizes: dict[str, set[int]] = {}
    for row in found["prompts"]:
        sizes.setdefault(row["decoding"], set()).update(len(row[name]) for name in _SLOTS)
    yield from sorted(f"prompts by slot of {name}" for name, some in sizes.items() if len(some) > 1)


def _bad_sums(found: Mapping[str, Any]) -> Iterator[str]:
    slots, counts = found["slots"], _list_of(_is_number)
    for name in dict.fromkeys(row["decoding"] for row in found["prompts"]):
        told = slots.get(name) if isinstance(slots, dict) else None
        if not isinstance(told, dict) or not all(counts(told.get(key)) for key in ("drafted", "accepted")):
            yield f"slots.{name}"


def _missing(block: Mapping[str, Any], kinds: Mapping[str, Fits]) -> list[str]:
    return [key for key, fits in kinds.items() if key not in block or not fits(block[key])]


def _other(block: Mapping[str, Any], kinds: Mapping[str, Fits]) -> list[str]:
    return [key for key, fits in kinds.items() if block.get(key) is not None and not fits(block[key])]
