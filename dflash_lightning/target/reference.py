"""What ``transformers.generate`` itself says: the reference that every lossless decoder must reproduce."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import GenerationConfig, PreTrainedModel

from dflash_lightning.target.frozen import FrozenTarget


def generate_plainly(target: FrozenTarget, prompt: list[int], *, max_new_tokens: int) -> list[int]:
    """Greedy output of ``transformers.generate``: the reference that every lossless decoder must reproduce.

    What the model's ``generation_config`` asks for besides (repetition penalty, n-gram bans, suppressed and forced
    tokens ...) is not applied: target, drafter and baselines share one law, the target's own.
    """
    return _generate(target, [prompt], max_new_tokens)[0]


def reference_outputs(
    target: FrozenTarget,
    prompts: list[list[int]],
    outputs: list[list[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
) -> list[list[int]]:
    """What ``transformers.generate`` answers every prompt with, to hold ``outputs`` against.

    Decoded in batches of similar length, padded on the left. Padding changes rounding, so that near ties may fall the
    other way: where a batch disagrees with ``outputs``, the prompt is decoded again by itself, and that is the truth.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: dict[int, list[int]] = {}
    for begin in range(0, len(order), batch_size):
        some = order[begin : begin + batch_size]
        found.update(zip(some, _generate(target, [prompts[i] for i in some], max_new_tokens), strict=True))
    for i, output in enumerate(outputs):
        if found[i] != output:
            found[i] = generate_plainly(target, prompts[i], max_new_tokens=max_new_tokens)
    return [found[i] for i in range(len(prompts))]


def _generate(target: FrozenTarget, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Outputs up to and including their first stop token."""
    width = max(map(len, prompts))
    padding = target.stop_ids[0] if target.stop_ids else 0
    ids = torch.tensor([[padding] * (width - len(prompt)) + prompt for prompt in prompts], device=target.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=target.device)
    with _without_generation_config(target.model):
        rows = target.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=list(target.stop_ids) or None,
            pad_token_id=padding,
        )
    stops = set(target.stop_ids)
    outputs: list[list[int]] = rows[:, width:].tolist()
    ends = [next((i + 1 for i, token in enumerate(row) if token in stops), len(row)) for row in outputs]
    return [row[:end] for row, end in zip(outputs, ends, strict=True)]


@contextmanager
def _without_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """``generate`` fills whatever it is not told from the model's ``generation_config``, so that is put away."""
    theirs = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = theirs
