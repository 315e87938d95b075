"""Decodes a bench's prompts: acceptance prompt by prompt, identity with plain decoding, and speed beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from dflash_lightning.bench.settings import Measure
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.batch_speed import speed_row
from dflash_lightning.decoding.evaluation import Evaluation, Evaluator
from dflash_lightning.decoding.types import Generation
from dflash_lightning.model import DraftModel
from dflash_lightning.target import FrozenTarget


@dataclass(frozen=True)
class BenchPrompt:
    """A rendered prompt. ``number`` keys its noise: it does not depend on how many prompts a domain has."""

    domain: str
    index: int
    number: int
    ids: list[int]


@dataclass
class Found:
    """What decoding a bench gave: rows of ``prompts`` and ``speed`` as measured.json has them, and the identity.

    ``broken`` says that outputs differ from the plain ones that must not.
    """

    prompts: list[dict[str, Any]]
    speed: list[dict[str, Any]]
    identical: dict[str, int]
    broken: bool


def in_turns(domains: Mapping[str, Sequence[list[int]]]) -> list[BenchPrompt]:
    """The prompts of all domains, one of each in turns, so that the first few are of every domain."""
    count = len(domains)
    columns = [
        [BenchPrompt(domain, i, i * count + place, ids) for i, ids in enumerate(prompts)]
        for place, (domain, prompts) in enumerate(domains.items())
    ]
    return [prompt for row in zip_longest(*columns) for prompt in row if prompt is not None]


def decode_bench(
    target: FrozenTarget,
    draft: DraftModel,
    prompts: list[BenchPrompt],
    measure: Measure,
    *,
    fed: Mapping[str, Any],
) -> Found:
    """Decode all prompts in every way that ``measure`` names, and time some; ``fed`` is the method's (``fed_by``).

    Raises:
        ValueError: a way to decode does not go with this drafter, or a prompt leaves no room for its answer.
    """
    settings = {name: measure.decoding(name, fed=fed) for name in measure.decodings}
    for each in settings.values():
        each.num_drafts(draft)  # refused before anything is decoded
    held = next((name for name, each in settings.items() if each.repeatable), None)
    rows: list[dict[str, Any]] = []
    evaluations: list[Evaluation] = []
    identical = {"compared": 0, "identical": 0, "rounded": 0}
    for name, each in settings.items():
        found = _evaluate(target, draft, prompts, each, name, num_checked=measure.compared if name == held else 0)
        rows += [_row(prompt, name, g, found) for prompt, g in zip(prompts, found.generations, strict=True)]
        evaluations.append(found)
        if name == held:
            identical = {key: getattr(found.stats, key) for key in identical}
    speed = _speed(target, draft, prompts, measure, fed, evaluations)
    return Found(rows, speed, identical, broken=any(evaluation.broken for evaluation in evaluations))


def _evaluate(
    target: FrozenTarget,
    draft: DraftModel,
    prompts: list[BenchPrompt],
    settings: DecodingSettings,
    what: str,
    *,
    num_checked: int,
) -> Evaluation:
    ids, numbers = [prompt.ids for prompt in prompts], [prompt.number for prompt in prompts]
    evaluator = Evaluator(target, draft, ids, settings, num_checked=num_checked, request_ids=numbers)
    return evaluator(f"decoding, {what}")


def _row(prompt: BenchPrompt, decoding: str, generation: Generation, found: Evaluation) -> dict[str, Any]:
    at_risk, stood = slot_counts(generation, found.stats.num_drafts)
    return {
        "domain": prompt.domain,
        "index": prompt.index,
        "decoding": decoding,
        "rounds": len(generation.committed),
        "committed": sum(generation.committed),
        "tokens": len(generation.output_ids),
        "accepted_by_slot": stood,
        "drafted_by_slot": at_risk,
        "finish": generation.finish,
        "repetitive": generation.repeats_itself,
    }


def slot_counts(generation: Generation, num_drafts: int) -> tuple[list[int], list[int]]:
    """By slot: rounds that reached it with a draft there, and those in which it stood; of rounds that nothing cut.

    Summed over answers they are ``at_risk`` and ``stood`` of ``DecodeStats``.
    """
    at_risk, stood = [0] * num_drafts, [0] * num_drafts
    rounds = zip(generation.offered, generation.accepted, generation.committed, strict=True)
    for offered, accepted, committed in rounds:
        if committed < accepted + 1:
            continue
        for slot in range(offered):
            at_risk[slot] += 1
            stood[slot] += slot < accepted
    return at_risk, stood


def _speed(
    target: FrozenTarget,
    draft: DraftModel,
    prompts: list[BenchPrompt],
    measure: Measure,
    fed: Mapping[str, Any],
    evaluations: list[Evaluation],
) -> list[dict[str, Any]]:
    """A row per batch size: drafted and plain decoding of the same prompts, taking turns; greedy."""
    timing = measure.timing
    rows: list[dict[str, Any]] = []
    if timing is None:
        return rows
    for batch in timing.batch_sizes:
        settings = measure.decoding("greedy", batch_size=batch, compile=timing.compile, fed=fed)
        some = prompts[: max(timing.prompts, batch)]
        found = _evaluate(target, draft, some, settings, f"timed at batch {batch}", num_checked=len(some))
        evaluations.append(found)
        rows.append(speed_row(found))
    return rows
