"""``dflash measure``: what the bench measures of finished runs, into ``measured.json`` of each."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dflash_lightning.acceptance import expected_tau, why_not
from dflash_lightning.bench import Measure
from dflash_lightning.bench.decode import decode_bench, in_turns
from dflash_lightning.bench.protocol import protocol_of
from dflash_lightning.bench.record import MEASURED_FILE, heading, training_of, why_anew
from dflash_lightning.bench.settings import fed_by
from dflash_lightning.bench.summary import one_line
from dflash_lightning.commands.drafts import FoundDraft, check_device, find_draft
from dflash_lightning.commands.early import finished_run
from dflash_lightning.commands.measure_words import MeasureWords
from dflash_lightning.commands.measured import PromptFile, check_once, load_files
from dflash_lightning.commands.ready import check_decoding, open_ready
from dflash_lightning.commands.redecoded import redecoded
from dflash_lightning.files import RECIPE_FILE, file_digest, write_atomic
from dflash_lightning.machine import machine
from dflash_lightning.recipe.arguments import by_import
from dflash_lightning.recipe.faults import RecipeError
from dflash_lightning.recipe.load import load_recipe
from dflash_lightning.recipe.make import make
from dflash_lightning.recipe.nodes import NodeChecker
from dflash_lightning.recipe.ranges import range_faults
from dflash_lightning.run import RunFolder, json_text, read_recipe, versions
from dflash_lightning.target import FrozenTarget


def measure(args: argparse.Namespace) -> int:
    """Measure every run that is not measured yet as it is asked for; 1 where output is not the target's own.

    With ``--to`` it is a copy of the run that is measured, decoded as the words say.

    Raises:
        ValueError: a run is not there or not finished, or the settings have faults; before anything is decoded.
    """
    words = MeasureWords.read(args.runs, args.overrides, to=args.to)
    check_device(args.device)
    check_once(words.runs, "RUN")
    asked = [(finished_run(name), _settings(name, words.settings)) for name in words.runs]
    if args.to is not None:
        asked = [(redecoded(run, Path(args.to), words.decoding), settings) for run, settings in asked]
    broken = False
    for run, settings in asked:
        recipe = read_recipe(run.recipe)
        protocol = protocol_of(run, recipe, settings)
        why = why_anew(run, protocol)
        if why is None and not args.again:
            print(f"{run.path / MEASURED_FILE} is up to date")
            continue
        print(f"measuring {run.path}: {why or '--again'}", flush=True)
        broken |= _measure(run, recipe, settings, protocol, args.device)
    return 1 if broken else 0


def _settings(name: str, words: Sequence[str]) -> Measure:
    """What to measure of a run: as its recipe says, or the option asked for; else the bench's own.

    Raises:
        RecipeError: the settings have faults.
    """
    own = read_recipe(Path(name).expanduser() / RECIPE_FILE, resolve=False).get("measure")
    chosen = any(word.startswith("measure=") for word in words)
    if isinstance(own, dict) and not chosen:
        cfg = load_recipe(str(Path(name).expanduser()), words)
    else:
        cfg = load_recipe("dflash", [*([] if chosen else ["measure=bench"]), *words])
    node: Any = OmegaConf.to_container(cfg.measure, resolve=True)
    faults = list(NodeChecker(by_import).value(node, Measure, "measure"))
    known = {fault.where for fault in faults}
    faults += [fault for fault in range_faults({"measure": node}) if fault.where not in known]
    if faults:
        raise RecipeError(faults, f"what is measured of {name}")
    made = make(node)
    assert isinstance(made, Measure)
    return made


def _measure(
    run: RunFolder, recipe: dict[str, Any], settings: Measure, protocol: dict[str, Any], device: str | None
) -> bool:
    """Decode, write ``measured.json`` and print a line; whether output is not what it must be."""
    draft, fed = find_draft(str(run.path)), fed_by(recipe)
    files = dict(zip(settings.prompts, load_files(list(settings.prompts.values()), settings.limit), strict=True))
    target, domains = _open(draft, settings, fed, files, device)
    found = decode_bench(target, draft.model, in_turns(domains), settings, fed=fed)
    step = draft.measured.get("step")
    parameters = sum(parameter.numel() for parameter in draft.model.parameters())
    measured = {
        **heading(run, recipe),
        "drafter_sha256": file_digest(draft.source),
        "target": {"name": target.facts.name, "digest": target.facts.digest},
        "protocol": protocol,
        "fed": fed,
        "training": training_of(run, None if step is None else int(step), parameters),
        "prompts": found.prompts,
        "speed": found.speed,
        "identical": found.identical,
        "expected_tau": _expected(target, draft, settings, fed),
        "device": str(target.device),
        "machine": machine(),
        "versions": versions(),
    }
    write_atomic(run.path / MEASURED_FILE, json_text(measured, indent=None))
    print(one_line(measured), flush=True)
    if found.broken:
        print(f"dflash: {run.path}: output is not the target's own. Decoding is at fault: the figures say nothing")
    return found.broken


def _expected(
    target: FrozenTarget, draft: FoundDraft, settings: Measure, fed: dict[str, Any]
) -> dict[str, dict[str, float]] | None:
    """The tau that rows of the target let expect, by decoding and domain; null where none is asked, or can be told."""
    told = {}
    for name, rows in (settings.expected or {}).items():
        if name not in settings.decodings:
            continue
        decoding = settings.decoding(name, fed=fed)
        if (reason := why_not(draft.model, decoding)) is not None:
            print(f"no expected tau, {name}: {reason}")
            continue
        print(f"expected tau, {name}: from the texts of measure.expected.{name} ...", flush=True)
        kwargs, where = draft.model.config.chat_template_kwargs, f"measure.expected.{name}"
        found = expected_tau(target, draft.model, rows, decoding, chat_template_kwargs=kwargs, setting=where)
        told[name] = {domain: rounds.tau for domain, rounds in found.items()}
    return told or None


def _open(
    draft: FoundDraft,
    settings: Measure,
    fed: dict[str, Any],
    files: dict[str, PromptFile],
    device: str | None,
) -> tuple[Any, dict[str, list[list[int]]]]:
    """The target, and the ids of every domain's prompts."""
    for _, way in settings.ways({"decoding": fed}):
        check_decoding(draft, way, alone=True)
    places = [(file, i) for file in files.values() for i in range(len(file.prompts))]
    where = argparse.Namespace(target=None, device=device, dtype=None, other_target=False)
    target, ids = open_ready(
        [draft],
        where,
        settings.decoding(settings.decodings[0], fed=fed),
        [file.prompts[i] for file, i in places],
        call=lambda place: f"prompt {places[place][1] + 1} of {places[place][0].path}",
    )
    rest = iter(ids)
    return target, {domain: [next(rest) for _ in file.prompts] for domain, file in files.items()}
