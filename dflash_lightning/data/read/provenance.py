"""What a file of regenerated answers was made with, kept in ``<file>.meta.json`` beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# Whether responses are the likeliest tokens, draws from the target's law, or nobody knows.
Labels = Literal["greedy", "sampled", "unknown"]


@dataclass(frozen=True)
class Draws:
    """How responses were drawn: temperature (0 is greedy) and truncation (null: none)."""

    temperature: float
    top_k: int | None = None
    top_p: float | None = None

    def __str__(self) -> str:
        if self.temperature == 0:
            return "greedy ones"
        cuts = {"top_k": self.top_k, "top_p": self.top_p}
        return ", ".join(
            [
                f"ones drawn at temperature {self.temperature:g}",
                *(f"{name} {value:g}" for name, value in cuts.items() if value is not None),
            ]
        )

    def are_samples(self, temperature: float) -> bool:
        """Whether they are draws from the whole law at ``temperature``."""
        return self.temperature == temperature > 0 and self.top_k is None and self.top_p in (None, 1.0)


@dataclass(frozen=True)
class Provenance:
    """What training has to know of a file that ``regenerate`` wrote."""

    labels: Labels
    draws: Draws
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
        sampling = made["sampling"]
        labels: Labels = sampling["labels"]
        draws = Draws(sampling["temperature"], sampling["top_k"], sampling["top_p"])
        found = Provenance(labels, draws, made["target"]["digest"], made["chat_template"]["kwargs"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{meta}: cannot be read as the provenance of {file.name} ({type(error).__name__}: {error}). It is written "
            "by dflash regenerate: get it again with its data, or remove it if the data is not regenerated."
        ) from None
    return found


@dataclass(frozen=True)
class JointProvenance:
    """What the sidecars of all training files say together.

    ``draws`` lists the different ways in which responses of known files were drawn; ``warnings`` are about what does
    not fit.
    """

    labels: Labels
    draws: list[Draws]
    warnings: list[str]


def joint_provenance(
    files: Iterable[Path | None], *, target_digest: str | None, chat_template_kwargs: Mapping[str, Any]
) -> JointProvenance:
    """Labels are greedy if those of any file are (what needs samples must not see it), else unknown if any are.

    A null file stands for a source that is none, of which nothing is known. With a null digest no target is compared.

    Warned of: answers of another target, and prompts rendered with other settings than evaluation will render them.
    """
    labels: set[Labels] = set()
    draws: dict[Draws, None] = {}
    warnings = []
    for file in files:
        made = None if file is None else read_provenance(file)
        labels.add("unknown" if made is None else made.labels)
        if made is not None:
            draws[made.draws] = None
        if made is not None and target_digest is not None and made.target_digest != target_digest:
            warnings.append(
                f"the answers in {file} are another target's, so the drafter learns what its own never says."
            )
        if made is not None and made.chat_template_kwargs != dict(chat_template_kwargs):
            warnings.append(
                f"{file} was regenerated with chat_template_kwargs {made.chat_template_kwargs}, but "
                f"data.chat_template_kwargs is {dict(chat_template_kwargs)}: evaluation asks otherwise than training."
            )
    order: tuple[Labels, ...] = ("greedy", "unknown", "sampled")
    return JointProvenance(next((entry for entry in order if entry in labels), "unknown"), list(draws), warnings)
