"""Which tokens of a document decoding would have written: its responses, as the loop counts them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dflash_lightning.types import Document


@dataclass(frozen=True)
class Response:
    """Tokens ``first .. end - 1`` of a document: what the target answered there.

    The first one comes from the prefill; rounds commit the others. ``stopped`` is false where the text ends without a
    stop token: the last token is then only a border, behind which nothing is known.
    """

    first: int
    end: int
    stopped: bool

    @property
    def committed(self) -> int:
        """Tokens that rounds commit."""
        return self.end - self.first - 1


def find_responses(document: Document, stop_ids: Collection[int], max_new_tokens: int) -> list[Response]:
    """The runs of supervised tokens, each up to its first stop token and at most ``max_new_tokens`` long."""
    ids, mask = document.input_ids.tolist(), document.loss_mask.tolist()
    found, first = [], 0
    while first < len(ids):
        end = first
        while end < len(ids) and mask[end]:
            end += 1
        if end > first:
            found.append(_clipped(ids, first, end, stop_ids, max_new_tokens))
        first = end + 1
    return found


def _clipped(ids: list[int], first: int, end: int, stop_ids: Collection[int], max_new_tokens: int) -> Response:
    for place in range(first, min(end, first + max_new_tokens)):
        if ids[place] in stop_ids:
            return Response(first, place + 1, stopped=True)
    return Response(first, min(end, first + max_new_tokens), stopped=False)


def anchors_of(responses: list[Response]) -> Int[Tensor, " N"]:
    """Every place where a round could begin, in order: all tokens of the responses but the last of each."""
    runs = [torch.arange(response.first, response.end - 1) for response in responses]
    return torch.cat(runs) if runs else torch.zeros(0, dtype=torch.long)


def mask_of(responses: list[Response], length: int) -> Bool[Tensor, " S"]:
    """Which of ``length`` tokens belong to a response."""
    mask = torch.zeros(length, dtype=torch.bool)
    for response in responses:
        mask[response.first : response.end] = True
    return mask
