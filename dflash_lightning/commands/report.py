"""``dflash report``: a finished run's numbers in one file: acceptance, identity, speed against two baselines."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from dflash_lightning.commands.drafts import FoundDraft, find_draft, open_target_of
from dflash_lightning.commands.evaluate import settings_of
from dflash_lightning.data import load_prompts, render_prompt
from dflash_lightning.data.overlap import ngram_overlap
from dflash_lightning.data.rows import ChatRow, read_rows
from dflash_lightning.decoding.benchmark import Timing, time_decoders
from dflash_lightning.decoding.evaluation import Evaluator
from dflash_lightning.run import RunFolder, versions

REPORT_FILE = "report.json"


def report(args: argparse.Namespace) -> int:
    """Decode held-out prompts with the run's best drafter, write ``report.json`` into the run and print it as a table.

    The exit status is 1 when an output differs from plain decoding.
    """
    settings = settings_of(args)
    folder = RunFolder(Path(args.run_dir))
    messages = load_prompts(args.prompts, limit=args.limit)
    draft = find_draft(args.run_dir)
    target = open_target_of(draft, args.target, device=args.device, dtype=args.dtype)
    prompts = [render_prompt(target.tokenizer, m, **draft.chat_template_kwargs) for m in messages]
    print(f"decoding {len(prompts)} held-out prompts, with and without drafts ...", flush=True)
    evaluation = Evaluator(target, draft.model, prompts, settings, num_checked=len(prompts))()
    print(evaluation.table("held-out prompts"), flush=True)
    timed = prompts[: args.timed]
    print(f"timing {len(timed)} of them one at a time, three decoders taking turns ...", flush=True)
    timings = time_decoders(target, draft.model, timed, settings)
    reference = timings["transformers_generate"].outputs
    same_as_generate = sum(a == b for a, b in zip(timings["speculative"].outputs, reference, strict=True))
    lossless = bool(evaluation.lossless) and same_as_generate == len(timed)
    state = folder.state
    figures: dict[str, Any] = {
        "tau": evaluation.stats.tau,
        "lossless": lossless,
        "prompts": len(prompts),
        "identical_to_plain_decoding": f"{evaluation.identical} of {evaluation.num_checked}",
        "identical_to_transformers_generate": f"{same_as_generate} of {len(timed)}",
        "timed_prompts": len(timed),
        "s_per_token": {name: timing.s_per_token for name, timing in timings.items()},
        "cpu_s_per_token": {name: timing.cpu_s_per_token for name, timing in timings.items()},
        "speedup_over_autoregressive": _ratio(timings, "autoregressive"),
        "speedup_over_transformers_generate": _ratio(timings, "transformers_generate"),
        "train_minutes": state.get("train_minutes"),
        "total_minutes": None if args.started is None else (time.time() - args.started) / 60,
        "decoding": evaluation.summary(),
        "overlap_with_training": _overlap(draft, messages),
        "prompts_file": str(args.prompts),
        "max_new_tokens": settings.max_new_tokens,
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "target": target.facts.name,
        "versions": versions(),
    }
    (folder.path / REPORT_FILE).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(_table(figures))
    print(f"written to {folder.path / REPORT_FILE}")
    return 0 if lossless else 1


def _ratio(timings: dict[str, Timing], baseline: str) -> float:
    return timings[baseline].s_per_token / timings["speculative"].s_per_token


def _overlap(draft: FoundDraft, messages: list[list[dict[str, Any]]]) -> dict[str, Any] | None:
    """Share of the prompts' word 13-grams that occur in the training text; null when the training file is unknown."""
    train = draft.recipe.get("data", {}).get("train")
    if not train:
        return None
    texts = [
        message["content"].split()
        for path in ([train] if isinstance(train, str) else train)
        for row in read_rows(path, setting="data.train")
        if isinstance(row, ChatRow)
        for message in row.messages
    ]
    overlap = ngram_overlap([m["content"].split() for row in messages for m in row], texts, n=13)
    return {"n": overlap.n, "ngram_share": overlap.ngram_share, "prompt_share": overlap.sample_share}


def _table(figures: dict[str, Any]) -> str:
    wall, cpu = figures["s_per_token"], figures["cpu_s_per_token"]
    rows = [
        ("tau (tokens per round, pooled)", f"{figures['tau']:.2f} on {figures['prompts']} held-out in-domain prompts"),
        (
            "lossless",
            f"{'yes' if figures['lossless'] else 'NO'}: {figures['identical_to_plain_decoding']} identical to "
            f"plain decoding, {figures['identical_to_transformers_generate']} to transformers.generate",
        ),
        *((f"ms per token, {name}", f"{1e3 * wall[name]:6.1f} wall   {1e3 * cpu[name]:6.1f} CPU") for name in wall),
        ("faster than the same loop without drafts", f"{figures['speedup_over_autoregressive']:.2f}x"),
        ("faster than transformers.generate", f"{figures['speedup_over_transformers_generate']:.2f}x"),
    ]
    if figures["overlap_with_training"] is not None:
        rows.append(("13-grams shared with training text", f"{figures['overlap_with_training']['ngram_share']:.1%}"))
    rows += [
        (f"{name} minutes", f"{figures[f'{name}_minutes']:.1f}")
        for name in ("train", "total")
        if figures[f"{name}_minutes"] is not None
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name.ljust(width)}  {value}" for name, value in rows)
