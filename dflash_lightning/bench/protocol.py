"""What must be the same for figures of two runs to be comparable."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from dflash_lightning.bench.settings import Measure
from dflash_lightning.files import file_digest, find_file
from dflash_lightning.run import RunFolder


def protocol_of(run: RunFolder, recipe: dict[str, Any], measure: Measure) -> dict[str, Any]:
    """What must be the same for figures of two runs to be comparable: rows, prompts, and how they were decoded."""
    data = recipe.get("data") or {}
    return {
        "train_rows": _train_digest(run.state.get("data") or {}),
        "train_limit": data.get("limit"),
        "prompts": {
            domain: file_digest(find_file(name, setting=f"measure.prompts.{domain}"))
            for domain, name in measure.prompts.items()
        },
        "expected": {
            where: file_digest(find_file(name, setting=f"measure.expected.{where}"))
            for where, name in flat_files(measure.expected or {})
        },
        "dtype": str((recipe.get("target") or {}).get("dtype")),
        **measure.summary(),
    }


def flat_files(tree: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Files of a mapping that names one, or one per domain, by key: ``greedy``, ``greedy.code``."""
    for key, value in tree.items():
        if isinstance(value, str):
            yield key, value
        else:
            yield from ((f"{key}.{domain}", name) for domain, name in value.items())


def _train_digest(data: dict[str, str]) -> str | None:
    """One digest of all training files, in the order of the recipe; of a single file its own."""
    digests = [digest for where, digest in data.items() if where.startswith("data.train")]
    if len(digests) < 2:
        return digests[0] if digests else None
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()
