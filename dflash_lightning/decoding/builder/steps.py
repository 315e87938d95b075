"""Walking along a proposer whose laws depend on the tokens drafted before."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from dflash_lightning.decoding.types import Scores


def follow(
    roots: Int[Tensor, " B"], scores: Scores, choose: Callable[[Scores, int], Int[Tensor, "B 1"]]
) -> tuple[Int[Tensor, "B D"], dict[str, Tensor]]:
    """One token per depth, chosen by ``choose(scores at the depth, depth)``; and the signals along the way, ``[B, D]``.

    Signals that only the first look has are handed on as they are.
    """
    assert scores.step is not None
    state, last = scores.state, roots[:, None]
    drafts, steps = [], []
    for depth in range(scores.logits.shape[1]):
        step, state = scores.step(state, last, depth)
        last = choose(step, depth)
        drafts.append(last)
        steps.append(step.signals)
    signals = {name: torch.cat([signal[name] for signal in steps], dim=1) for name in (steps[0] if steps else ())}
    return torch.cat(drafts, dim=1), {**scores.signals, **signals}


def as_steps(scores: Scores) -> Callable[..., tuple[Scores, object]]:
    """``scores.step``, or a step for laws that do not depend on tokens."""
    if scores.step is not None:
        return scores.step

    def step(state: object, tokens: Int[Tensor, "B W"], depth: int) -> tuple[Scores, object]:
        shape = (*tokens.shape, scores.logits.shape[-1])
        ids = scores.ids
        if ids is not None and ids.ndim == 3:
            ids = ids[:, depth, None].expand(shape)
        return Scores(scores.logits[:, depth, None].expand(shape), ids), state

    return step
