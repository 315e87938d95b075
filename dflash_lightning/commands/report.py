"""``dflash report``: a finished run's numbers in one file: acceptance, identity, speed against two baselines."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from dflash_lightning.commands.drafts import FoundDraft, check_device, find_draft, other_target
from dflash_lightning.commands.measured import load_files
from dflash_lightning.commands.ready import decoding_of, open_ready
from dflash_lightning.commands.report_decoding import decode_for_report
from dflash_lightning.commands.report_page import about_run, further, measure_further, possible_sizes
from dflash_lightning.commands.report_text import SHOWN, failures, table
from dflash_lightning.commands.run_figures import PROMPTS_KEY, REPORT_FILE, own_prompts, read_report
from dflash_lightning.data import Prompt
from dflash_lightning.data.overlap import ngram_overlap
from dflash_lightning.data.read.rows import ChatRow, TextRow, TokenRow
from dflash_lightning.data.read.sources import make_sources
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.benchmark import Timing, check_greedy
from dflash_lightning.decoding.interval import tau_interval
from dflash_lightning.files import find_file, write_atomic
from dflash_lightning.machine import machine
from dflash_lightning.model.files import WEIGHTS_FILE
from dflash_lightning.pages import report_page
from dflash_lightning.run import RunFolder, file_digest, json_text, versions
from dflash_lightning.target import FrozenTarget
from dflash_lightning.target.served import served_line, served_settings

OTHER_REPORT_FILE = "report_other_target.json"
SHIPPED_PROMPTS = "package://dflash_lightning/data/quickstart/test.jsonl"


def report(args: argparse.Namespace) -> int:
    """Decode prompts with the run's best drafter, write ``report.json`` into the run and print it as a table.

    With ``--html`` it is written as a page too. With ``--keep`` a report of the same drafter, prompts and settings is
    printed instead of being made again. On another target than the drafter's own the file is
    ``report_other_target.json``: the run's report stays its own.

    The exit status is 1 when output differs from the target's own by more than rounding (in float32: at all), and when
    tau is below ``--min-tau``.
    """
    folder = RunFolder(_folder(args.run_dir))
    file = folder.path / (OTHER_REPORT_FILE if args.other_target else REPORT_FILE)
    settings = decoding_of(args)
    check_greedy(settings)
    check_device(args.device)
    draft = find_draft(args.run_dir)
    prompts = _choose_prompts(args, draft)
    asked = _asked(args, draft, prompts, settings)
    earlier = read_report(file)
    spent = _spent(folder)  # a damaged run.json is found before anything is measured, and so is a damaged checkpoint
    about = about_run(folder, draft) if args.html else {}
    if args.keep and _holds(earlier, asked):
        print(f"{file} is up to date")
        figures = earlier
    else:
        measured = _measure(args, draft, prompts, settings)
        figures = {
            **measured,
            **spent,
            "total_minutes": _total_minutes(args, folder, earlier),
            "note": prompts.note,
            "asked": asked,
        }
        write_atomic(file, json_text(figures))
        print(f"written to {file}")
    if args.html:
        write_atomic(Path(args.html), report_page({**figures, **about}))
        print(f"the page is {args.html}")
    print(table(figures))
    reasons = failures(figures, args.min_tau)
    for reason in reasons:
        print(f"dflash: {reason}", file=sys.stderr)
    return 1 if reasons else 0


def _folder(path: str) -> Path:
    """The run's folder, into which the report is written.

    Raises:
        ValueError: ``path`` is something else that holds a drafter.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        what = "is a file" if folder.is_file() else "is not here"
        raise ValueError(
            f"RUN: {path} {what}, and a report is written into the folder of a run. Give that folder, or use "
            f"dflash evaluate --draft {path} --prompts FILE."
        )
    return folder


@dataclass(frozen=True)
class _Prompts:
    """Which prompts are measured, where they were named, how many of them, and what they are in words."""

    path: str
    limit: int | None
    note: str | None
    setting: str = "--prompts"


def _choose_prompts(args: argparse.Namespace, draft: FoundDraft) -> _Prompts:
    """Those asked for, else the run's own held-out ones (as many as it evaluates), else the quickstart's."""
    if args.prompts is not None:
        return _Prompts(args.prompts, args.limit, args.note)
    if own := own_prompts(draft):
        note = args.note or "the run's own held-out prompts, by which its best checkpoint was chosen"
        where = f"{PROMPTS_KEY} of the run (another file: --prompts FILE)"
        return _Prompts(own["prompts"], args.limit or own.get("limit"), note, where)
    return _Prompts(SHIPPED_PROMPTS, args.limit, args.note or "the quickstart's prompts: the run names none")


def _asked(
    args: argparse.Namespace, draft: FoundDraft, prompts: _Prompts, settings: DecodingSettings
) -> dict[str, Any]:
    """All that the figures depend on, but for what else the machine is doing."""
    weights = draft.source if draft.source.is_file() else draft.source / WEIGHTS_FILE
    names = ("timed", "target", "other_target", "device", "dtype")
    return {
        "drafter_sha256": file_digest(weights) if weights.is_file() else None,
        "prompts_sha256": file_digest(find_file(prompts.path, setting=prompts.setting)),
        "versions": versions(),
        "limit": prompts.limit,
        "note": prompts.note,
        "decoding": settings.summary(),
        **{name: getattr(args, name) for name in names},
        **further(args),
    }


def _holds(earlier: dict[str, Any], asked: dict[str, Any]) -> bool:
    """Whether a report is whole and has all that is asked now; curves and answers may be in it without being asked."""
    there = dict(earlier.get("asked") or {})
    for name in ("batch_sizes", "answers"):
        if name not in asked:
            there.pop(name, None)
    return there == asked and all(name in earlier for name in SHOWN)


def _measure(
    args: argparse.Namespace, draft: FoundDraft, chosen: _Prompts, settings: DecodingSettings
) -> dict[str, Any]:
    (file,) = load_files([chosen.path], chosen.limit)
    possible_sizes(args, len(file.prompts))  # refused before anything is decoded
    target, prompts = open_ready(
        [draft], args, settings, file.prompts, call=lambda place: f"prompt {place + 1} of {file.path}"
    )
    found = decode_for_report(target, draft.model, prompts, settings, timed=args.timed)
    evaluation, timings = found.evaluation, found.timings
    generations = evaluation.generations
    interval = tau_interval(generations)
    return {
        "tau": evaluation.stats.tau,
        "tau_interval": None if interval is None else interval.as_list(),
        "lossless": bool(evaluation.lossless) and found.same == len(prompts),
        "verdict": found.verdict,
        "prompts": len(prompts),
        "identical_to_plain_decoding": f"{evaluation.stats.identical} of {evaluation.stats.compared}",
        "identical_to_transformers_generate": f"{found.same} of {len(prompts)}",
        "differences_from_transformers_generate": [asdict(difference) for difference in found.differences],
        "timed_prompts": found.timed,
        "timed_identical_to_transformers_generate": f"{found.timed_same} of {found.timed}",
        "batched_prompts": len(prompts) - found.timed,
        "batch_size": settings.batch_size,
        "looped_answers": evaluation.stats.looped_requests,
        "cut_answers": evaluation.stats.cut_requests,
        "tau_without_loops": evaluation.stats.tau_without_loops,
        "warnings": evaluation.warnings,
        "s_per_token": {name: timing.s_per_token for name, timing in timings.items()},
        "cpu_s_per_token": {name: timing.cpu_s_per_token for name, timing in timings.items()},
        "speedup_over_autoregressive": _ratio(timings, "autoregressive"),
        "speedup_over_transformers_generate": _ratio(timings, "transformers_generate"),
        "decoding": {**evaluation.summary(), **evaluation.checked.times()},  # checked: those that were timed
        "overlap_with_training": _overlap(draft, target, file.prompts, evaluation.outputs),
        "prompts_file": str(file.path),
        "max_new_tokens": settings.max_new_tokens,
        "dtype": str(target.dtype).removeprefix("torch."),
        "generation_config": served_settings(target),
        "served": served_line(target, settings.summary()),
        "measured_at": time.time(),
        "device": str(target.device),
        "machine": machine(),
        "target": target.facts.name,
        "other_target": other_target(draft, target),
        "versions": versions(),
        **measure_further(target, draft.model, prompts, file.prompts, settings, args),
    }


def _ratio(timings: dict[str, Timing], baseline: str) -> float | None:
    """How much faster drafting is; null where nothing was drafted."""
    stats = timings["speculative"].stats
    if stats is None or not stats.rounds:
        return None
    return timings[baseline].s_per_token / timings["speculative"].s_per_token


def _spent(folder: RunFolder) -> dict[str, Any]:
    """What the run says of itself: whether it was trained to its end, and minutes of training and evaluation."""
    state = folder.state
    return {
        "finished": state.get("finished"),
        **{name: state.get(name) for name in ("train_minutes", "evaluation_minutes")},
    }


def _total_minutes(args: argparse.Namespace, folder: RunFolder, earlier: dict[str, Any]) -> float | None:
    """Minutes since ``--started``; a run that was finished before that keeps the total it had."""
    finished_at = folder.state.get("finished_at")
    if args.started is None or (finished_at is not None and finished_at < args.started):
        return earlier.get("total_minutes")
    return (time.time() - args.started) / 60


# -- what the prompts share with the training text --------------------------------------------------------------------


def _overlap(
    draft: FoundDraft, target: FrozenTarget, asked: list[Prompt], outputs: list[list[int]]
) -> dict[str, Any] | None:
    """Share of word 13-grams, of the prompts and of the target's answers to them, that occur in the training text.

    Null where there is nothing to compare.
    """
    data = draft.recipe.get("data") or {}
    if not data.get("train"):
        return None
    reference: list[list[str]] = []
    try:
        for source in make_sources(data["train"], limit=data.get("limit")):
            for row in source.good_rows():
                reference += [text.split() for text in _texts(row, target.tokenizer)]
    except ValueError as error:
        print(f"no overlap with the training text is reported: {error}")
        return None
    overlap = ngram_overlap([m["content"].split() for prompt in asked for m in prompt.messages], reference, n=13)
    if not overlap.reference_ngrams or not overlap.ngrams:
        return None
    shares = {"n": overlap.n, "ngram_share": overlap.ngram_share, "prompt_share": overlap.sample_share}
    if target.tokenizer is not None:
        answers = [str(target.tokenizer.decode(ids, skip_special_tokens=True)).split() for ids in outputs]
        shares["answer_ngram_share"] = ngram_overlap(answers, reference, n=13).ngram_share
    return shares


def _texts(row: Any, tokenizer: Any) -> Iterator[str]:
    """The texts of a training row: its messages, or what its ids say between special tokens."""
    if isinstance(row, TextRow):
        yield row.text
    elif isinstance(row, ChatRow):
        yield from (message["content"] for message in row.messages)
    elif isinstance(row, TokenRow) and tokenizer is not None:
        special = set(tokenizer.all_special_ids)
        for is_special, ids in groupby(row.input_ids, key=special.__contains__):
            if not is_special:
                yield tokenizer.decode(list(ids), skip_special_tokens=True)
