"""What ``transformers.generate`` itself says: the reference that every lossless decoder must reproduce."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from dflash_lightning.target.frozen import FrozenTarget

# Called with (row of the batch, its new token) for every token of an answer.
OnToken = Callable[[int, int], object]


def generate_plainly(
    target: FrozenTarget, prompt: list[int], *, max_new_tokens: int, on_token: OnToken | None = None
) -> list[int]:
    """Greedy output of ``transformers.generate``: the reference that every lossless decoder must reproduce.

    What the model's ``generation_config`` asks for besides (repetition penalty, n-gram bans, suppressed and forced
    tokens ...) is not applied: target, drafter and baselines share one law, the target's own.
    """
    return _generate(target, [prompt], max_new_tokens, on_token)[0]


def reference_outputs(
    target: FrozenTarget,
    prompts: list[list[int]],
    outputs: list[list[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """What ``transformers.generate`` answers every prompt with, to hold ``outputs`` against.

    Decoded in batches of similar length, padded on the left. Padding changes rounding, so that near ties may fall the
    other way: where a batch disagrees with ``outputs``, the prompt is decoded again by itself, and that is the truth.
    ``on_token`` hears of a prompt's tokens under its index, those of a second time too.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: dict[int, list[int]] = {}
    for begin in range(0, len(order), batch_size):
        some = order[begin : begin + batch_size]
        batch = [prompts[i] for i in some]
        found.update(zip(some, _generate(target, batch, max_new_tokens, _numbered(on_token, some)), strict=True))
    for i, output in enumerate(outputs):
        if found[i] != output:
            found[i] = _generate(target, [prompts[i]], max_new_tokens, _numbered(on_token, [i]))[0]
    return [found[i] for i in range(len(prompts))]


def _numbered(on_token: OnToken | None, numbers: list[int]) -> OnToken | None:
    return None if on_token is None else lambda row, token: on_token(numbers[row], token)


def _generate(
    target: FrozenTarget, prompts: list[list[int]], max_new_tokens: int, on_token: OnToken | None = None
) -> list[list[int]]:
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
            **({} if on_token is None else {"stopping_criteria": [_Listener(len(prompts), target.stop_ids, on_token)]}),
        )
    stops = set(target.stop_ids)
    outputs: list[list[int]] = rows[:, width:].tolist()
    ends = [next((i + 1 for i, token in enumerate(row) if token in stops), len(row)) for row in outputs]
    return [row[:end] for row, end in zip(outputs, ends, strict=True)]


class _Listener:
    """A stopping criterion that stops nothing: ``generate`` asks it after every token."""

    def __init__(self, rows: int, stop_ids: tuple[int, ...], on_token: OnToken) -> None:
        self.live, self.stop_ids, self.on_token = set(range(rows)), frozenset(stop_ids), on_token

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if row in self.live:
                self.on_token(row, token)
                if token in self.stop_ids:
                    self.live.remove(row)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@contextmanager
def _without_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """``generate`` fills whatever it is not told from the model's ``generation_config``, so that is put away."""
    theirs = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = theirs
