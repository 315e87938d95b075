"""``dflash report``: a finished run's numbers in one file: acceptance, identity, speed against two baselines."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from dflash_lightning.commands.drafts import FoundDraft, find_draft, open_target_of
from dflash_lightning.commands.evaluate import settings_of
from dflash_lightning.commands.report_text import failures, table
from dflash_lightning.commands.run_figures import REPORT_FILE
from dflash_lightning.data import load_prompts, render_prompt
from dflash_lightning.data.overlap import ngram_overlap
from dflash_lightning.data.rows import ChatRow, TextRow, TokenRow
from dflash_lightning.data.sources import make_sources
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.benchmark import Timing, time_decoders
from dflash_lightning.decoding.evaluation import Evaluator
from dflash_lightning.files import find_file
from dflash_lightning.run import RunFolder, file_digest, json_text, machine, versions
from dflash_lightning.target import FrozenTarget
from dflash_lightning.target.reference import reference_outputs
from dflash_lightning.target.served import served_line, served_settings


def report(args: argparse.Namespace) -> int:
    """Decode prompts with the run's best drafter, write ``report.json`` into the run and print it as a table.

    With ``--keep`` a report of the same drafter, prompts and settings is printed instead of being made again.

    The exit status is 1 when float32 output differs from the target's own, and when tau is below ``--min-tau``.
    """
    folder = RunFolder(Path(args.run_dir))
    file = folder.path / REPORT_FILE
    draft = find_draft(args.run_dir)
    asked = _asked(args, draft)
    earlier = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if args.keep and earlier.get("asked") == asked:
        print(f"{file} is up to date")
        figures = earlier
    else:
        figures = {**_measure(args, draft), **_minutes(args, folder, earlier), "note": args.note, "asked": asked}
        file.write_text(json_text(figures), encoding="utf-8")
        print(f"written to {file}")
    print(table(figures))
    reasons = failures(figures, args.min_tau)
    for reason in reasons:
        print(f"dflash: {reason}", file=sys.stderr)
    return 1 if reasons else 0


def _asked(args: argparse.Namespace, draft: FoundDraft) -> dict[str, Any]:
    """All that the figures depend on, but for what else the machine is doing."""
    names = ("limit", "timed", "max_new_tokens", "batch_size", "target", "device", "dtype", "note")
    return {
        "drafter_sha256": file_digest(draft.source) if draft.source.is_file() else None,
        "prompts_sha256": file_digest(find_file(args.prompts, setting="--prompts")),
        "versions": versions(),
        **{name: getattr(args, name) for name in names},
    }


def _measure(args: argparse.Namespace, draft: FoundDraft) -> dict[str, Any]:
    settings = settings_of(args)
    messages = load_prompts(args.prompts, limit=args.limit)
    target = open_target_of(draft, args.target, device=args.device, dtype=args.dtype)
    prompts = [render_prompt(target.tokenizer, m, **draft.chat_template_kwargs) for m in messages]
    print(f"decoding {len(prompts)} prompts, with and without drafts ...", flush=True)
    evaluation = Evaluator(target, draft.model, prompts, settings, num_checked=len(prompts))()
    print(evaluation.table("report"), flush=True)
    print("decoding them with transformers.generate ...", flush=True)
    same = _count_equal(evaluation.outputs, _reference(target, prompts, evaluation.outputs, settings))
    timed = prompts[: args.timed]
    print(f"timing {len(timed)} of them one at a time, three decoders taking turns ...", flush=True)
    timings = time_decoders(target, draft.model, timed, settings)
    timed_same = _count_equal(timings["speculative"].outputs, timings["transformers_generate"].outputs)
    overlap = _overlap(draft, target, messages, evaluation.outputs)
    return {
        "tau": evaluation.stats.tau,
        "lossless": bool(evaluation.lossless) and same == len(prompts) and timed_same == len(timed),
        "prompts": len(prompts),
        "identical_to_plain_decoding": f"{evaluation.identical} of {evaluation.num_checked}",
        "identical_to_transformers_generate": f"{same} of {len(prompts)}",
        "timed_prompts": len(timed),
        "timed_identical_to_transformers_generate": f"{timed_same} of {len(timed)}",
        "s_per_token": {name: timing.s_per_token for name, timing in timings.items()},
        "cpu_s_per_token": {name: timing.cpu_s_per_token for name, timing in timings.items()},
        "speedup_over_autoregressive": _ratio(timings, "autoregressive"),
        "speedup_over_transformers_generate": _ratio(timings, "transformers_generate"),
        "decoding": evaluation.summary(),
        "overlap_with_training": overlap,
        "prompts_file": str(args.prompts),
        "max_new_tokens": settings.max_new_tokens,
        "dtype": str(target.dtype).removeprefix("torch."),
        "generation_config": served_settings(target),
        "served": served_line(target, vars(settings)),
        "measured_at": time.time(),
        "device": str(target.device),
        "machine": machine(),
        "target": target.facts.name,
        "versions": versions(),
    }


def _reference(
    target: FrozenTarget, prompts: list[list[int]], outputs: list[list[int]], settings: DecodingSettings
) -> list[list[int]]:
    return reference_outputs(
        target, prompts, outputs, max_new_tokens=settings.max_new_tokens, batch_size=settings.batch_size
    )


def _count_equal(ours: list[list[int]], theirs: list[list[int]]) -> int:
    return sum(a == b for a, b in zip(ours, theirs, strict=True))


def _ratio(timings: dict[str, Timing], baseline: str) -> float:
    return timings[baseline].s_per_token / timings["speculative"].s_per_token


def _minutes(args: argparse.Namespace, folder: RunFolder, earlier: dict[str, Any]) -> dict[str, Any]:
    """Minutes of training, and since ``--started``; a run that was finished before that keeps the total it had."""
    state = folder.state
    finished_at = state.get("finished_at")
    if args.started is None or (finished_at is not None and finished_at < args.started):
        total = earlier.get("total_minutes")
    else:
        total = (time.time() - args.started) / 60
    spent = {name: state.get(name) for name in ("train_minutes", "evaluation_minutes")}
    return {**spent, "total_minutes": total}


# -- what the prompts share with the training text --------------------------------------------------------------------


def _overlap(
    draft: FoundDraft, target: FrozenTarget, messages: list[list[dict[str, Any]]], outputs: list[list[int]]
) -> dict[str, Any] | None:
    """Share of word 13-grams, of the prompts and of the target's answers to them, that occur in the training text.

    Null where there is nothing to compare.
    """
    data = draft.recipe.get("data", {})
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
    overlap = ngram_overlap([m["content"].split() for row in messages for m in row], reference, n=13)
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
