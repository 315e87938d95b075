"""Tells answers that go round in circles: drafting a loop is easy, so acceptance on one says nothing of a drafter."""

from __future__ import annotations

from collections.abc import Sequence

_ROUNDS = 3  # a stretch is a loop once it has been said so often
_LEAST = 12  # tokens of a loop; shorter ones are a row of digits, an indentation, a laugh
_PERIOD = 256  # tokens of the longest round that is looked for
_GRAM = 4  # tokens that count as said before when they come again in this order


def repeats_itself(ids: Sequence[int]) -> bool:
    """Whether an answer (without its stop token) is a loop, or mostly a repetition of itself.

    It is when its end goes round with one period, three times or more over 12 tokens or more; when such a stretch fills
    half of it; or when more than half of its runs of four tokens stood in it before, which finds loops with a counter
    in them.
    """
    if len(ids) < _LEAST:
        return False
    anywhere, at_the_end = _loops(ids)
    if at_the_end or 2 * anywhere >= len(ids):
        return True
    grams = [tuple(ids[i : i + _GRAM]) for i in range(len(ids) - _GRAM + 1)]
    return 2 * len(set(grams)) < len(grams)


def _loops(ids: Sequence[int]) -> tuple[int, int]:
    """Tokens of the longest loop anywhere, and of the longest that lasts to the end; 0 where there is none."""
    anywhere = at_the_end = 0
    for period in range(1, min(len(ids) // _ROUNDS, _PERIOD) + 1):
        enough, length = max(_ROUNDS * period, _LEAST), period
        for before, token in zip(ids, ids[period:], strict=False):
            length = length + 1 if token == before else period
            if length >= enough:
                anywhere = max(anywhere, length)
        at_the_end = max(at_the_end, length if length >= enough else 0)
    return anywhere, at_the_end
