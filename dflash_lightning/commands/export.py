"""``dflash export``: a drafter as a folder that another program serves."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from dflash_lightning.commands.drafts import FoundDraft, find_draft, open_target_of
from dflash_lightning.commands.run_figures import figures_of, own_prompts, trained_length
from dflash_lightning.data import load_prompts, render_prompt
from dflash_lightning.export import FORMATS, check_format, serving
from dflash_lightning.export import export as write_export
from dflash_lightning.files import check_export_place
from dflash_lightning.target import FrozenTarget

NUM_PROMPTS = 4
# What the replay decodes where the drafter's run names no prompts of its own.
MESSAGES = (
    "Write a Python function that adds two numbers.",
    "Explain in two sentences why the sky is blue.",
    "List three fruits and their colours.",
)


def export(args: argparse.Namespace) -> int:
    """Write the folder and print how to serve it."""
    folder = Path(args.out)
    check_export_place(folder, replace=args.replace, source=Path(args.draft).expanduser())
    draft = find_draft(args.draft)
    check_format(draft.model.config, args.format, args.weights)
    report = figures_of(draft)
    asked = _asked(args, draft)
    target = open_target_of(draft, args.target, device=args.device, dtype=args.dtype)
    facts = write_export(
        draft.model,
        target,
        folder,
        format=args.format,
        dtype=args.weights,
        prompts=_prompts(asked, draft, target),
        max_new_tokens=args.max_new_tokens,
        chat_template_kwargs=draft.chat_template_kwargs,
        report=report,
        trained_length=trained_length(draft),
        replace=args.replace,
    )
    command, note = serving(FORMATS[args.format], draft.model.config, facts, str(folder))
    print(f"written to {folder} ({args.format}, {args.weights}). To serve it:\n\n{command}")
    if note:
        print(f"\n{note}")
    return 0


def _asked(args: argparse.Namespace, draft: FoundDraft) -> list[Any]:
    """The prompts of the replay, read before the target: those given, else the run's own, else a few of ours."""
    if args.prompts is not None:
        return list(load_prompts(args.prompts, limit=NUM_PROMPTS))
    ours: list[Any] = [[{"role": "user", "content": text}] for text in MESSAGES]
    file = own_prompts(draft).get("prompts")
    if file is None:
        return ours
    try:
        return list(load_prompts(file, limit=NUM_PROMPTS))
    except ValueError as error:  # a run may be exported elsewhere than where it was trained
        print(f"the replay is of prompts of ours, as those of the run cannot be read ({error})", file=sys.stderr)
        return ours


def _prompts(asked: list[Any], draft: FoundDraft, target: FrozenTarget) -> list[list[int]]:
    """Ids of the replay's prompts; made up ones without a tokenizer."""
    if target.tokenizer is None or not target.chat_template_text:
        size = target.facts.num_tokens or target.facts.vocab_size
        return [[(37 * i + 11 * n) % size for i in range(24)] for n in range(1, NUM_PROMPTS)]
    rows, kwargs = target.facts.vocab_size, draft.chat_template_kwargs
    return [render_prompt(target.tokenizer, m, vocab_size=rows, **kwargs) for m in asked]
