"""``dflash regenerate``: training rows whose responses are the target's own."""

from __future__ import annotations

import argparse

from dflash_lightning.commands.drafts import find_draft, open_target, open_target_of
from dflash_lightning.commands.ready import decoding_of
from dflash_lightning.regenerate.answering import by_equality
from dflash_lightning.regenerate.regenerate import RegenerateReport
from dflash_lightning.regenerate.regenerate import regenerate as regenerate_file


def regenerate(args: argparse.Namespace) -> int:
    """Answer the prompts and say what became of them."""
    decoding = by_equality(decoding_of(args))
    draft = None if args.draft is None else find_draft(args.draft)
    if draft is None:
        target = open_target(args.target, device=args.device, dtype=args.dtype)
    else:
        target = open_target_of(draft, args.target, device=args.device, dtype=args.dtype)
    kwargs = args.chat_template_kwargs
    if kwargs is None and draft is not None:
        kwargs = draft.chat_template_kwargs  # what the drafter was trained with
    report = regenerate_file(
        args.prompts,
        target,
        args.out,
        decoding=decoding,
        limit=args.limit,
        chat_template_kwargs=kwargs,
        draft=None if draft is None else draft.model,
    )
    print(*_lines(report), sep="\n")
    return 0


def _lines(report: RegenerateReport) -> list[str]:
    counts = report.counts
    before = f" ({report.resumed} before this call)" if report.resumed else ""
    lines = [
        f"{report.out}: {counts.rows} of {counts.prompts} prompts answered{before}, {counts.response_tokens} response "
        f"tokens, {counts.cut} answers cut at --max-new-tokens"
    ]
    if counts.lines > counts.rows:
        lines.append(f"  {counts.lines} rows: the template rewrites history, so that later turns are rows of their own")
    if report.failures is not None:
        lines.append(
            f"  {counts.failed} prompts without answer, {counts.unfinished} with some turns unanswered: see "
            f"{report.failures}"
        )
    if report.new_tokens:
        lines.append(
            f"  {report.new_tokens} tokens in {report.seconds:.1f} s, {report.new_tokens / report.seconds:.1f}/s"
        )
    return lines
