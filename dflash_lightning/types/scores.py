"""What a head says of the tokens to come, and lanes of the states it goes on from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass
class Scores:
    """What a drafter thinks of the tokens after each root; made by a head, read by a builder.

    ``logits`` hold ``D`` laws per row: one column per token id, or per entry of ``ids`` (a reduced vocabulary, or
    candidates of each slot). Without ``step`` these are the laws. With ``step`` the law of a token depends on the
    tokens drafted before it, and ``logits`` are a first look only: ``step(state, tokens, depth)`` then gives the laws
    at ``depth`` (0 for the token right after the root) of ``W`` lanes per row whose last tokens are ``tokens``, with
    the state to go on from. The ``logits`` of what it returns are ``[B, W, c]``. It starts from ``state``, one lane
    per row, and the roots as ``tokens``; it never changes a state in place, so that a lane is copied by
    ``gather_lanes``.

    ``signals`` are what policies read, per slot ``[B, D]`` or per row ``[B]``; what ``step`` returns has those of its
    own depth, per lane ``[B, W]``. A signal that depends on drafted tokens is known to ``step`` only.

    ``draw``, where a head has it beside ``step``, makes a chain of all slots at once: ``draw(choose)`` asks ``choose``
    once or several times for a token of every slot, given their laws as a ``Scores`` without ``step``, and returns the
    last answer with the laws it was chosen from. ``choose`` must answer slot by slot, with the same noise every time.

    ``redraft``, where a second drafter stands by, gives its scores of ``W`` blocks per row after the same roots:
    ``redraft(tokens, known)`` is told drafts [B, W, D] and how many of them each block knows [B, W]. Rows of its scores
    are the blocks of the first row, then those of the second. Laws of known drafts mean nothing.
    """

    logits: Float[Tensor, "B D c"]
    ids: Int[Tensor, " c"] | Int[Tensor, "B D c"] | None = None
    signals: dict[str, Tensor] = field(default_factory=dict)
    state: Any = None
    step: Callable[[Any, Int[Tensor, "B W"], int], tuple[Scores, Any]] | None = None
    draw: Callable[[Callable[[Scores], Int[Tensor, "B D"]]], tuple[Int[Tensor, "B D"], Scores]] | None = None
    redraft: Callable[[Int[Tensor, "B W D"], Int[Tensor, "B W"]], Scores] | None = None


def gather_lanes(state: Any, index: Int[Tensor, "B W"]) -> Any:
    """The lanes ``index`` of a state of ``Scores``: tensors ``[B, lanes, ...]``, or tuples, lists and dicts of them.

    A tensor with a single lane for all (``[B, 1, ...]``) may be asked for lane 0 as often as wanted. Null stays null.
    """
    if isinstance(state, Tensor):
        shape = (*index.shape, *(1 for _ in state.shape[2:]))
        return state.gather(1, index.view(shape).expand(*index.shape, *state.shape[2:]))
    if isinstance(state, dict):
        return {name: gather_lanes(value, index) for name, value in state.items()}
    if isinstance(state, tuple | list):
        return type(state)(gather_lanes(value, index) for value in state)
    assert state is None, f"a state of lanes is made of tensors, not of {type(state)}"
    return None


def best_chain(scores: Scores, roots: Int[Tensor, " B"]) -> Int[Tensor, "B D"]:
    """The likeliest token of every law, each after the ones before it."""
    if scores.step is None:
        return _likeliest(scores)
    state, drafts = scores.state, [roots[:, None]]
    for depth in range(scores.logits.shape[1]):
        law, state = scores.step(state, drafts[-1], depth)
        drafts.append(_likeliest(law))
    return torch.cat(drafts[1:], dim=1)


def _likeliest(scores: Scores) -> Int[Tensor, "B n"]:
    return token_ids(scores.logits.argmax(-1)[..., None], scores.ids)[..., 0]


def token_ids(places: Int[Tensor, "B D K"], ids: Int[Tensor, "*slots v"] | None) -> Int[Tensor, "B D K"]:
    """Tokens of columns: ``ids`` are the same for all slots ``[v]``, or each slot's own ``[B, D, v]``."""
    if ids is None:
        return places
    return ids[places] if ids.ndim == 1 else ids.gather(-1, places)
