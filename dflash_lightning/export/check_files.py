"""What an exported folder's own files say against one another, before anything is computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from dflash_lightning.export.base import DTYPES
from dflash_lightning.export.conventions import Conventions
from dflash_lightning.export.exported import Exported
from dflash_lightning.export.replay import digests
from dflash_lightning.files import CONFIG_FILE
from dflash_lightning.model.files import WEIGHTS_FILE
from dflash_lightning.model.weights import check_tensors, check_unquantised

MISSING = object()


def unlike_spellings(exported: Exported) -> Iterator[str]:
    """Settings that config.json must state under several names, and does not state alike."""
    for group in exported.exporter.spellings:
        found = {path: lookup(exported.raw, path) for path in group}
        for path, value in found.items():
            if value is MISSING:
                yield f"config.json has no {path}, which {exported.exporter.consumer} looks for"
        present = {path: value for path, value in found.items() if value is not MISSING}
        if any(value != next(iter(present.values())) for value in present.values()):
            stated = ", ".join(f"{path}={value}" for path, value in present.items())
            yield f"config.json contradicts itself: {stated}"


def lookup(tree: Any, path: str) -> Any:
    """The value at a dotted path; ``MISSING`` where there is none."""
    for key in path.split("."):
        if not isinstance(tree, Mapping) or key not in tree:
            return MISSING
        tree = tree[key]
    return tree


def wrong_dtype(exported: Exported) -> Iterator[str]:
    """Whether config.json states the dtype that the tensors have."""
    stated = exported.raw.get("dtype")
    floats = {name: value for name, value in exported.tensors.items() if value.is_floating_point()}
    found = sorted({str(value.dtype).removeprefix("torch.") for value in floats.values()})
    if stated not in DTYPES:
        yield f"dtype: config.json states {stated!r}, not one of {list(DTYPES)}"
    elif found != [stated]:
        yield f"dtype: config.json states {stated}, but the tensors are {' and '.join(found)}"


def no_numbers(exported: Exported) -> Iterator[str]:
    """Codes of a quantised file, or values that are none."""
    try:
        check_unquantised(exported.raw, CONFIG_FILE)
        check_tensors(exported.tensors, WEIGHTS_FILE)
    except ValueError as error:
        yield str(error)


def changed_tensors(exported: Exported) -> dict[str, str]:
    """What became of the weights since the export, by the name of the fault."""
    was, now = exported.replay.tensors, digests(exported.tensors)
    missing = sorted(name for name in was.keys() - now.keys() if "norm" in name)
    changed = sorted(name for name in was.keys() & now.keys() if was[name][0] != now[name][0])
    rounded = [name for name in changed if was[name][1] == now[name][1]]
    others = [name for name in changed if name not in rounded]
    ones = [name for name in others if "norm" in name and bool((exported.tensors[name] == 1).all())]
    found = {}
    if missing or ones:
        gone = f"{listed(missing)} missing" if missing else f"every gain of {listed(ones)} is 1, as if never loaded"
        found["norm_missing"] = f"norm without its weights: {gone}"
    if rounded:
        found["dtype"] = f"dtype: {len(rounded)} of {len(was)} tensors were cast since the export"
    if others:
        found["weights"] = f"{len(others)} of {len(was)} tensors are not those exported: {listed(others)}"
    return found


def listed(names: list[str], limit: int = 6) -> str:
    """The first ``limit`` names, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def wrong_tensors(weights: Mapping[str, Tensor], conventions: Conventions) -> Iterator[str]:
    """Tensors that are missing, unknown to the consumer, or of another shape than it expects."""
    expected = conventions.shapes()
    if missing := sorted(expected.keys() - weights.keys()):
        yield f"tensors are missing: {listed(missing)}"
    if unexpected := sorted(weights.keys() - expected.keys()):
        yield f"tensors that the consumer does not know: {listed(unexpected)}"
    for name in sorted(expected.keys() & weights.keys()):
        if tuple(weights[name].shape) != expected[name]:
            yield f"{name} has shape {tuple(weights[name].shape)}, but config.json implies {expected[name]}"
