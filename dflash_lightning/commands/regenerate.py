"""``dflash regenerate``: training rows whose responses are the target's own."""

from __future__ import annotations

import argparse

from dflash_lightning.commands.drafts import open_target
from dflash_lightning.data.regenerate import regenerate as regenerate_file


def regenerate(args: argparse.Namespace) -> int:
    """Answer the prompts and say what became of them."""
    target = open_target(args.target, device=args.device, dtype=args.dtype)
    report = regenerate_file(
        args.prompts,
        target,
        args.out,
        batch_size=args.batch_size,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        limit=args.limit,
    )
    print(
        f"{report.out}: {report.rows} of {report.prompts} prompts answered ({report.resumed} before this call), "
        f"{report.failed} failed, {report.cut} cut at --max-new-tokens, {report.response_tokens} response tokens"
    )
    return 0
