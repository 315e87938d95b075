"""``dflash evaluate``: what drafters are worth on held-out prompts, decoded for real."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dflash_lightning.commands.drafts import FoundDraft, check_device, find_draft, other_target
from dflash_lightning.commands.evaluate_text import side_by_side, title
from dflash_lightning.commands.measured import Measured, PromptFile, check_once, load_files
from dflash_lightning.commands.output_file import check_output
from dflash_lightning.commands.ready import decoding_of, open_ready
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.decoder import DecodeResult
from dflash_lightning.decoding.evaluation import Evaluator
from dflash_lightning.files import write_atomic
from dflash_lightning.machine import machine
from dflash_lightning.run import json_text, versions
from dflash_lightning.target import FrozenTarget
from dflash_lightning.target.served import served_line, served_settings


def evaluate(args: argparse.Namespace) -> int:
    """Print the figures of every drafter, and write them to ``--json``.

    The exit status is 1 when greedy output is not the plain one: in float32 at any difference, in other dtypes where
    rounding cannot explain it.
    """
    settings = decoding_of(args)
    check_device(args.device)
    check_output(args.json, "--json", [*args.prompts, *args.draft])
    files = load_files(args.prompts, args.limit)
    check_once(args.draft, "--draft")
    drafts = [find_draft(path) for path in args.draft]
    _check_alike(drafts, relative=args.other_target)
    prompts = [prompt for file in files for prompt in file.prompts]
    target, ids = open_ready(drafts, args, settings, prompts, call=lambda place: _place(files, place))
    found, unread = _measure(drafts, target, ids, settings, files, keeps=args.json is not None)
    if args.json:
        write_atomic(Path(args.json), json_text(_report(found, target, settings, files)))
    if unread is not None:  # what was measured is in the file all the same
        raise unread
    print(side_by_side(found), end="")
    return 1 if any(measured.evaluation.broken for measured in found) else 0


def _check_alike(drafts: list[FoundDraft], *, relative: bool) -> None:
    """Drafters are compared on one target and the same prompts, so these must be rendered alike for all.

    Raises:
        ValueError: two were made for different targets (which ``relative`` allows), or trained with different settings
            of the chat template.
    """
    first = drafts[0]
    for other in drafts[1:]:
        made_for = [draft.model.config.target for draft in (first, other)]
        if not relative and len({target.get("digest") for target in made_for} - {None}) > 1:
            raise ValueError(
                f"--draft: {first.source} was made for the target {made_for[0].get('name')}, {other.source} for "
                f"{made_for[1].get('name')} with other weights. Measure them one by one, or all on one --target with "
                "--other-target."
            )
        if other.chat_template_kwargs != first.chat_template_kwargs:
            raise ValueError(
                f"--draft: {first.source} was trained with chat_template_kwargs {first.chat_template_kwargs}, "
                f"{other.source} with {other.chat_template_kwargs}: their prompts differ. Measure them one by one."
            )


def _place(files: list[PromptFile], place: int) -> str:
    for file in files:
        if place < len(file.prompts):
            return f"prompt {place + 1} of {file.path}"
        place -= len(file.prompts)
    raise AssertionError("a place beyond all prompts")


def _measure(
    drafts: list[FoundDraft],
    target: FrozenTarget,
    ids: list[list[int]],
    settings: DecodingSettings,
    files: list[PromptFile],
    *,
    keeps: bool,
) -> tuple[list[Measured], BrokenPipeError | None]:
    """One drafter after the other; what is decoded plainly is decoded once.

    ``keeps`` says that the figures are written to a file: then a reader that goes away is told at the end only.
    """
    plain: DecodeResult | None = None
    found, unread = [], None
    for draft in drafts:
        evaluator = Evaluator(target, draft.model, ids, settings, num_checked=len(ids), plain=plain)
        name = draft.source.name if len(drafts) == 1 else str(draft.source)
        measured = Measured(draft, evaluator(f"decoding with {name}"), files, other_target(draft, target))
        plain = evaluator.plain
        found.append(measured)
        try:
            print(measured.evaluation.table(title(measured)), measured.by_file(), sep="\n", flush=True)
        except BrokenPipeError as error:
            if not keeps:
                raise
            unread = error
    if unread is None and (served := served_line(target, settings.summary())) is not None:
        print(served)
    return found, unread


def _report(
    found: list[Measured], target: FrozenTarget, settings: DecodingSettings, files: list[PromptFile]
) -> dict[str, Any]:
    """What ``--json`` holds: the figures of every drafter, and what they were measured on.

    Those of a single drafter stand at the top as well.
    """
    drafts = [measured.summary() for measured in found]
    names = [str(file.path) for file in files]
    return {
        **(drafts[0] if len(drafts) == 1 else {}),
        "drafts": drafts,
        "prompts": sum(len(file.prompts) for file in files),
        "prompts_file": names[0] if len(names) == 1 else names,
        "target": target.facts.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "decoding": settings.summary(),
        "generation_config": served_settings(target),
        "served": served_line(target, settings.summary()),
        "device": str(target.device),
        "machine": machine(),
        "versions": versions(),
    }
