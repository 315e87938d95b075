"""A drafter's evaluation on prompts of one or more files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_lightning.commands.drafts import FoundDraft
from dflash_lightning.data import left_out_line, load_prompts
from dflash_lightning.decoding.evaluation import Evaluation
from dflash_lightning.decoding.interval import Interval, pooled_tau, tau_interval
from dflash_lightning.decoding.types import Generation


@dataclass(frozen=True)
class PromptFile:
    """Prompts and where they were read."""

    path: str
    prompts: list[Any]


def load_files(paths: list[str], limit: int | None) -> list[PromptFile]:
    """The prompts of every file, the first ``limit`` of each; what their rows leave out is said.

    Raises:
        ValueError: a file is given twice, is not there or holds no prompt.
    """
    check_once(paths, "--prompts")
    files = [PromptFile(path, list(load_prompts(path, limit=limit))) for path in paths]
    for file in files:
        if (left_out := left_out_line(file.prompts)) is not None:
            print(f"{file.path}: {left_out}", flush=True)
    return files


def check_once(paths: list[str], option: str) -> None:
    """Refuse a path given twice, however it is spelled: it would be measured twice, and count twice in all sums.

    Raises:
        ValueError: names both spellings.
    """
    seen: dict[Path, str] = {}
    for path in paths:
        place = Path(path).expanduser().resolve()
        if place in seen:
            again = "" if seen[place] == path else f" (as {seen[place]} too)"
            raise ValueError(f"{option}: {path} is given twice{again}. Name it once.")
        seen[place] = path


@dataclass
class Measured:
    """What one drafter did; ``other_target`` says so where it did it on another target than its own."""

    draft: FoundDraft
    evaluation: Evaluation
    files: list[PromptFile]
    other_target: dict[str, Any] | None = None

    @property
    def interval(self) -> Interval | None:
        """Of tau over all prompts."""
        return tau_interval(self.evaluation.generations)

    def answers(self) -> Iterator[tuple[PromptFile, list[Generation]]]:
        """The answers to the prompts of each file."""
        begin = 0
        for file in self.files:
            end = begin + len(file.prompts)
            yield file, self.evaluation.generations[begin:end]
            begin = end

    def by_file(self) -> str:
        """A line per file, and one for all where there are several."""
        rows = [(str(file.path), generations) for file, generations in self.answers()]
        if len(rows) > 1:
            rows.append(("all", self.evaluation.generations))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name.ljust(width)}  {tau_text(generations)}" for name, generations in rows)

    def summary(self) -> dict[str, Any]:
        """The figures of a JSON report."""
        return {
            **self.evaluation.summary(),
            "draft": str(self.draft.source),
            "other_target": self.other_target,
            "tau_interval": _list(self.interval),
            "files": [
                {
                    "file": str(file.path),
                    "prompts": len(file.prompts),
                    "tau": pooled_tau(generations),
                    "tau_interval": _list(tau_interval(generations)),
                }
                for file, generations in self.answers()
            ],
            "answers": [
                {
                    "file": str(file.path),
                    "tokens": len(generation.output_ids),
                    "rounds": len(generation.committed),
                    "tau": pooled_tau([generation]),
                    "finish": generation.finish,
                    "repeats_itself": generation.repeats_itself,
                }
                for file, generations in self.answers()
                for generation in generations
            ],
        }


def tau_text(generations: list[Generation]) -> str:
    """``tau 2.31 (95 %: 2.10 to 2.52)  40 prompts``."""
    if not any(generation.committed for generation in generations):
        return f"no round was drafted  {len(generations)} prompts"
    interval = tau_interval(generations)
    certain = "" if interval is None else f" (95 %: {interval})"
    return f"tau {pooled_tau(generations):.2f}{certain}  {len(generations)} prompts"


def _list(interval: Interval | None) -> list[float] | None:
    return None if interval is None else interval.as_list()
