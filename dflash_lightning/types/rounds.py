"""Rounds of a real decoding as training data: where each began, what was drafted, and what the target thought of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DecodedRound:
    """One round of one answer, at temperature 0.

    ``anchor`` is the index of its root among the answer's tokens. ``log_probs[i]`` is the target's log-probability of
    ``drafts[i]`` given the text and the drafts before it, and ``own`` that of the target's token after the ``accepted``
    ones. So the log-probabilities of drafts behind a rejected one are conditioned on that one.
    """

    anchor: int
    drafts: tuple[int, ...]
    accepted: int
    log_probs: tuple[float, ...]
    own: float

    @property
    def rejects(self) -> bool:
        """Whether a draft does not stand."""
        return self.accepted < len(self.drafts)


@dataclass(frozen=True)
class Segment:
    """A training block: it begins at ``anchor`` and learns the answer's tokens up to and with ``last``.

    ``rejected`` are (place, token, log-probability) of drafts of this very block that did not stand, place 1 first.
    """

    anchor: int
    last: int
    rejected: tuple[tuple[int, int, float], ...]


def segments(
    rounds: Sequence[DecodedRound], length: int, num_drafts: int, *, suffix: bool = True
) -> tuple[Segment, ...]:
    """The blocks that the rounds of an answer of ``length`` tokens give (Draft-OPD, arXiv 2605.29343).

    One begins where the first round does, and one at every token that replaced a rejected draft. It learns up to the
    next such token, which is among what it learns, but no more than ``num_drafts``. ``suffix`` takes all rejected
    drafts of a round, else the first one alone. Answers without a rejected draft give nothing.
    """
    if not any(found.rejects for found in rounds):
        return ()
    by_anchor = {found.anchor: found for found in rounds}
    begins = [rounds[0].anchor] + [found.anchor + found.accepted + 1 for found in rounds if found.rejects]
    begins = [anchor for anchor in begins if anchor < length - 1]
    blocks = []
    for anchor, following in zip(begins, [*begins[1:], length - 1], strict=True):
        found = by_anchor.get(anchor)
        rejected: tuple[tuple[int, int, float], ...] = ()
        if found is not None:
            places = range(found.accepted, len(found.drafts) if suffix else min(found.accepted + 1, len(found.drafts)))
            rejected = tuple((i + 1, found.drafts[i], found.log_probs[i]) for i in places)
        blocks.append(Segment(anchor, min(following, anchor + num_drafts), rejected))
    return tuple(blocks)


def label_log_probs(rounds: Sequence[DecodedRound]) -> dict[int, float]:
    """The target's log-probability of every committed token, by its index among the answer's tokens."""
    found: dict[int, float] = {}
    for one in rounds:
        found |= {one.anchor + 1 + i: one.log_probs[i] for i in range(one.accepted)}
        found[one.anchor + one.accepted + 1] = one.own
    return found
