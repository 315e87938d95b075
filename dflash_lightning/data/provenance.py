"""What a file of regenerated answers was made with, kept in ``<file>.meta.json`` beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# Whether responses are the likeliest tokens, draws from the target's law, or nobody knows.
Labels = Literal["greedy", "sampled", "unknown"]


@dataclass(frozen=True)
class Provenance:
    """What training has to know of a file that ``regenerate`` wrote."""

    labels: Labels
    target_digest: str
    chat_template_kwargs: dict[str, Any]


def meta_path(file: Path) -> Path:
    """The sidecar of a file of answers."""
    return file.with_name(file.name + ".meta.json")


def read_provenance(file: Path) -> Provenance | None:
    """What ``file`` was made with, or null where there is no sidecar.

    Raises:
        ValueError: the sidecar is not one that ``regenerate`` wrote.
    """
    meta = meta_path(file)
    if not meta.is_file():
        return None
    try:
        made = json.loads(meta.read_text(encoding="utf-8"))["made_with"]
        labels: Labels = made["sampling"]["labels"]
        found = Provenance(labels, made["target"]["digest"], made["chat_template"]["kwargs"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{meta}: cannot be read as the provenance of {file.name} ({type(error).__name__}: {error}). It is written "
            "by dflash regenerate: get it again with its data, or remove it if the data is not regenerated."
        ) from None
    return found


def joint_labels(files: Iterable[Path]) -> Labels:
    """The labels of several files together: greedy if any is (what needs samples must not see it), else the unknown."""
    found = {"unknown" if made is None else made.labels for made in map(read_provenance, files)}
    order: tuple[Labels, ...] = ("greedy", "unknown", "sampled")
    return next((labels for labels in order if labels in found), "unknown")
