"""``dflash evaluate``: what a drafter is worth on held-out prompts, decoded for real."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_lightning.commands.drafts import check_device, find_draft, open_target_of
from dflash_lightning.data import load_prompts, render_prompt
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.evaluation import Evaluator
from dflash_lightning.run import json_text, machine, versions
from dflash_lightning.target import FrozenTarget
from dflash_lightning.target.served import served_line, served_settings


def evaluate(args: argparse.Namespace) -> int:
    """Print the figures, and write them to ``--json``; 1 when greedy float32 output is not the plain one."""
    settings = settings_of(args)
    check_device(args.device)
    prompts = load_prompts(args.prompts, limit=args.limit)
    draft = find_draft(args.draft)
    target = open_target_of(draft, args.target, device=args.device, dtype=args.dtype)
    ids = [render_prompt(target.tokenizer, messages, **draft.chat_template_kwargs) for messages in prompts]
    check_room(settings, target, ids)
    evaluation = Evaluator(target, draft.model, ids, settings, num_checked=len(ids))()
    print(evaluation.table(f"{draft.source} on {args.prompts}"))
    served = served_line(target, vars(settings))
    if served is not None:
        print(f"  {served}")
    if args.json:
        report: dict[str, Any] = {
            **evaluation.summary(),
            "prompts": len(ids),
            "prompts_file": str(args.prompts),
            "draft": str(draft.source),
            "target": target.facts.name,
            "dtype": str(target.dtype).removeprefix("torch."),
            "decoding": vars(settings),
            "generation_config": served_settings(target),
            "served": served,
            "device": str(target.device),
            "machine": machine(),
            "versions": versions(),
        }
        Path(args.json).write_text(json_text(report), encoding="utf-8")
    return 1 if evaluation.broken else 0


def settings_of(args: argparse.Namespace) -> DecodingSettings:
    """Decoding as the command line asks for it."""
    return DecodingSettings(
        max_new_tokens=args.max_new_tokens,
        batch_size=getattr(args, "batch_size", 1),
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        compile=not getattr(args, "eager", False),
    )


def check_room(settings: DecodingSettings, target: FrozenTarget, prompts: Sequence[list[int]]) -> None:
    """Refuse answers that the target has no positions for before buffers of that size are made.

    Raises:
        ValueError: says by how much the longest prompt's answer goes too far.
    """
    positions, longest = target.facts.max_positions, max(map(len, prompts), default=0)
    if longest + settings.max_new_tokens > positions:
        raise ValueError(
            f"--max-new-tokens: {settings.max_new_tokens} behind a prompt of {longest} tokens, but "
            f"{target.facts.name} has {positions} positions. Use {max(positions - longest, 0)} at most, or a shorter "
            "prompt."
        )
