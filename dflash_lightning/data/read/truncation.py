"""Documents longer than ``max_length``: what is cut, so that no mask and no context says something untrue."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from dflash_lightning.data.read.messages import Message
from dflash_lightning.data.read.store import MaskedIds

Truncate = Literal["right", "left", "drop"]
TRUNCATE: tuple[Truncate, ...] = ("right", "left", "drop")


def last_of_text(document: MaskedIds, max_length: int) -> MaskedIds:
    """The last tokens of a plain text, behind those that open every text (BOS): ``max_length`` together.

    The first of the text's own tokens is not supervised, as in the whole text: nothing is left that it could follow.
    """
    if len(document) <= max_length:
        return document
    opening = int(document.mask.argmax()) - 1  # the text's own first token stands before the first supervised one
    ids = np.concatenate([document.ids[:opening], document.ids[len(document) - (max_length - opening) :]])
    mask = np.concatenate([document.mask[:opening], document.mask[len(document) - (max_length - opening) :]])
    mask[: opening + 1] = False
    return MaskedIds(ids, mask)


def without_oldest(
    messages: Sequence[Message], encode: Callable[[list[int]], list[MaskedIds]], max_length: int
) -> list[MaskedIds]:
    """Documents of the conversation without as many of its oldest exchanges as it takes to fit; none if it never does.

    ``encode`` makes the documents of the messages at some places.

    That is what a chat client does when the window is full. What is left is rendered anew: it begins as every
    conversation does (BOS, and the system prompt, which stays), so the target reads nothing that it would not read when
    served, and positions count from the new start. Cutting tokens instead would begin in the middle of a prompt.
    """
    starts = exchange_starts(messages)
    tried: dict[int, list[MaskedIds]] = {}

    def fits(start: int) -> bool:
        tried[start] = encode([*range(starts[0]), *range(start, len(messages))])
        return all(len(document) <= max_length for document in tried[start])

    place = bisect_left(starts, True, lo=min(1, len(starts)), key=fits)
    return tried[starts[place]] if place < len(starts) else []


def exchange_starts(messages: Sequence[Message]) -> list[int]:
    """Indices of the user messages that open an exchange: the first one, and each that follows something else."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return [i for i in users if i == users[0] or messages[i - 1]["role"] != "user"]
