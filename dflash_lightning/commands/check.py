"""``dflash check``: does an exported folder still draft what was exported, and if not, what is wrong with it?"""

from __future__ import annotations

import argparse
from pathlib import Path

from dflash_lightning.commands.drafts import open_target
from dflash_lightning.export import Exported, Outcome, check, merge_observed
from dflash_lightning.files import find_file
from dflash_lightning.model.files import read_object
from dflash_lightning.target import FrozenTarget

OBSERVED_ADVICE = "Give --observed a file with {'prompts': [{'prompt_ids': .., 'draft_ids': ..}]}."


def check_export(args: argparse.Namespace) -> int:
    """Print what was found; 1 when something differs."""
    exported = Exported.open(Path(args.folder))
    name = args.target or str(exported.replay.target.get("name"))
    target: FrozenTarget = open_target(name, device=args.device, dtype=args.dtype or exported.replay.dtype)
    observed = None
    if args.observed is not None:
        file = find_file(args.observed, setting="--observed")
        observed = merge_observed(exported.replay, read_object(file, OBSERVED_ADVICE))
    outcome = check(exported, target, observed)
    print(describe(outcome, args.folder, exported))
    return 0 if outcome.passed else 1


def describe(outcome: Outcome, folder: str, exported: Exported) -> str:
    """The outcome in words."""
    head = f"{folder}: {outcome.format}, read as {exported.exporter.read_in}"
    lines = [f"{head}: {'OK' if outcome.passed else 'DIFFERS'}"]
    lines += [f"  FAULT  {fault}" for fault in outcome.faults]
    lines += [f"  note   {note}" for note in outcome.notes]
    if outcome.cause is not None:
        lines.append(f"  CAUSE  {outcome.cause[1]}")
    return "\n".join(lines)
