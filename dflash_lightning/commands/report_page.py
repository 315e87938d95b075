"""What ``dflash report --html`` shows beyond the report's figures: answers round by round, and the run's history."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from dflash_lightning.commands.drafts import FoundDraft
from dflash_lightning.data import Prompt
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.batch_speed import speed_row, time_batches
from dflash_lightning.decoding.interval import pooled_tau
from dflash_lightning.decoding.record import Recorder, RoundRecord
from dflash_lightning.decoding.types import Generation
from dflash_lightning.decoding.watch import watching
from dflash_lightning.model import DraftModel
from dflash_lightning.model.found import read_history
from dflash_lightning.run import RunFolder
from dflash_lightning.target import FrozenTarget

BATCH_SIZES = [1, 2, 4, 8]
ANSWERS = 10  # that the page shows round by round
_WINDOW = 24  # tokens before a new one that decide on how it is written


def further(args: argparse.Namespace) -> dict[str, Any]:
    """What is to be measured beyond the report's own figures; empty for a plain report."""
    sizes = args.batch_sizes or (BATCH_SIZES if args.html else None)
    return {
        **({} if sizes is None else {"batch_sizes": sizes}),
        **({"answers": ANSWERS} if args.html else {}),
    }


def possible_sizes(args: argparse.Namespace, prompts: int) -> tuple[list[int], list[str]]:
    """Batch sizes that ``prompts`` prompts can fill, and in words those that they cannot.

    Raises:
        ValueError: a size that was asked for is among the latter.
    """
    asked = further(args).get("batch_sizes", [])
    larger = [size for size in asked if size > prompts]
    if larger and args.batch_sizes:
        raise ValueError(
            f"--batch-sizes: {larger[0]} prompts cannot be decoded together, because there are {prompts}. "
            f"Use sizes up to {prompts}, or more prompts (--prompts, --limit)."
        )
    return [size for size in asked if size <= prompts], [f"batch {size}: only {prompts} prompts" for size in larger]


def measure_further(
    target: FrozenTarget,
    draft: DraftModel,
    rendered: list[list[int]],
    prompts: Sequence[Prompt],
    settings: DecodingSettings,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """The parts of ``further`` that were asked for: ``speed`` by batch size, ``answers`` round by round."""
    found: dict[str, Any] = {}
    sizes, missing = possible_sizes(args, len(prompts))
    if sizes:
        whole = max(sizes)
        count = max(whole, min(args.timed, len(prompts)) // whole * whole)
        timed = time_batches(target, draft, rendered[:count], settings, sizes)
        found |= {"speed": [speed_row(evaluation) for evaluation in timed], "speed_gaps": missing}
    if "answers" in further(args):
        found["answers"] = _answers(target, draft, rendered[:ANSWERS], prompts, settings)
    return found


def about_run(folder: RunFolder, draft: FoundDraft) -> dict[str, Any]:
    """What a page says of the run itself, beside what is measured now.

    Raises:
        ValueError: a checkpoint of the run is damaged.
    """
    return {
        "run": str(folder.path),
        "history": history(folder),
        "settings": dict(_leaves(draft.recipe)),
        "checkpoint": draft.source.name,
    }


def history(folder: RunFolder) -> list[dict[str, float]]:
    """What the run's own evaluations found, by step; of either checkpoint what it has, and the end of the run."""
    found: dict[float, dict[str, float]] = {}
    for file in (folder.best, folder.last):
        if file.exists():
            found |= {entry["step"]: entry for entry in read_history(file)}
    state = folder.state
    step, tau = state.get("optimizer_steps"), state.get("tau")
    if step is not None and tau is not None and float(step) not in found:
        found[float(step)] = {"step": float(step), "decode/tau": tau}
    return [found[step] for step in sorted(found)]


# -- answers, round by round ------------------------------------------------------------------------------------------


def _answers(
    target: FrozenTarget,
    draft: DraftModel,
    rendered: list[list[int]],
    prompts: Sequence[Prompt],
    settings: DecodingSettings,
) -> list[dict[str, Any]]:
    """The first answers once more, in batches and untimed, with what every round drafted."""
    decoder = settings.make_decoder(target, draft, longest_prompt=max(map(len, rendered)), compile=False)
    recorder = Recorder.listen(decoder)
    most, stop_ids = settings.max_new_tokens, target.stop_ids
    with watching("decoding round by round", len(rendered), max_new_tokens=most, stop_ids=stop_ids) as watch:
        found = decoder.decode(rendered, max_new_tokens=most, stop_ids=stop_ids, on_round=watch)
    return [
        _answer(target.tokenizer, prompt, generation, recorder.rounds(generation))
        for prompt, generation in zip(prompts, found.generations, strict=False)
    ]


def _answer(tokenizer: Any, prompt: Prompt, generation: Generation, rounds: list[RoundRecord]) -> dict[str, Any]:
    return {
        "prompt": str(prompt.messages[-1].get("content")),
        "finish": generation.finish,
        "repeats_itself": generation.repeats_itself,
        "tau": pooled_tau([generation]),
        "tokens": len(generation.output_ids),
        "first": token_texts(tokenizer, [], generation.output_ids[:1]),
        "rounds": list(_rounds(tokenizer, generation.output_ids, rounds)),
    }


def _rounds(tokenizer: Any, ids: list[int], rounds: list[RoundRecord]) -> Iterator[dict[str, Any]]:
    said = 1
    for record in rounds:
        before = ids[:said]
        after = [*before, *record.accepted]
        yield {
            "accepted": token_texts(tokenizer, before, record.accepted),
            "own": token_texts(tokenizer, after, record.own),
            "branched": record.branched,
            "rejected": (
                [text for token in record.rejected for text in token_texts(tokenizer, after, [token])]
                if record.branched
                else token_texts(tokenizer, after, record.rejected)
            ),
        }
        said += len(record.accepted) + len(record.own)
    assert said == len(ids), "the rounds are not those of the answer"


def token_texts(tokenizer: Any, before: list[int], ids: list[int]) -> list[str]:
    """What each of ``ids`` adds to the text of ``before``. A character of several tokens comes with its last one."""
    if tokenizer is None:
        return [f"{token} " for token in ids]
    window, texts = before[-_WINDOW:], []
    known = _whole(tokenizer, window)
    for n in range(len(ids)):
        text = _whole(tokenizer, [*window, *ids[: n + 1]])
        texts.append(text[len(known) :] if text.startswith(known) else str(tokenizer.decode([ids[n]])))
        known = text
    return texts


def _whole(tokenizer: Any, ids: list[int]) -> str:
    """Text without a character at its end that is not whole yet."""
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""
    return str(text).rstrip("\N{REPLACEMENT CHARACTER}")


def _leaves(tree: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """``key.key`` and value of every setting."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{where}.{key}" if where else str(key))
    else:
        yield where, "null" if tree is None else str(tree)
