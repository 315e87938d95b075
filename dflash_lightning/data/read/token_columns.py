"""Columns beside the ids of a tokenised row: what says otherwise than that all ids are one text, learned as masked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_lightning.data.read.marks import plain
from dflash_lightning.data.read.values import short

# What several texts in one row come with: a row is one text here, and its tokens see all before them.
_PACKED = {
    *("culens", "cuseqlens", "cuseqlen", "seqlens", "seqlen", "seqlengths", "sequencelengths", "doclengths"),
    *("segmentids", "sequenceids", "sequenceid", "documentids", "docids", "seqidx", "seqids", "packids"),
}
_NOT_LEARNED = -100  # as PyTorch's cross entropy has it


def check_tokens(given: Mapping[str, Any], where: str, ids: Sequence[int], mask: Sequence[int]) -> None:
    """Refuse padding, several packed texts, and labels or masks that differ from ``loss_mask``.

    Raises:
        ValueError: a column says so; names it.
    """
    for key, value in given.items():
        name = plain(key)
        if name == "attentionmask" and isinstance(value, list) and (set(value) != {1} or len(value) != len(ids)):
            if 0 in value:
                raise ValueError(f"{where}: {key} leaves out tokens, but every token is read. Remove the padding.")
            raise _packed(where, key, value)
        if name == "positionids" and isinstance(value, list) and value != list(range(len(ids))):
            raise _packed(where, key, value)
        if name in _PACKED and isinstance(value, list) and not _is_one(value, len(ids)):
            raise _packed(where, key, value)
        if name in ("assistantmasks", "assistantmask") and value != mask:
            raise ValueError(f"{where}: {key!r} and 'loss_mask' differ. Remove one of them.")
        if name == "labels" and isinstance(value, list) and not _same(value, ids, mask):
            raise ValueError(
                f"{where}: {key!r} and 'loss_mask' differ: where the mask is 1 a label is the token itself, and "
                f"{_NOT_LEARNED} where it is 0. Remove one of them."
            )


def _is_one(value: list[Any], length: int) -> bool:
    """Whether lengths, bounds or numbers of texts say that there is one."""
    return value in ([length], [0, length]) or (len(value) == length and len(set(map(str, value))) == 1)


def _same(labels: list[Any], ids: Sequence[int], mask: Sequence[int]) -> bool:
    """Whether labels say what the mask says; the first token may have one, which nothing comes before."""
    told = [token if learned else _NOT_LEARNED for token, learned in zip(ids, mask, strict=True)]
    return len(labels) == len(told) and labels[1:] == told[1:]


def _packed(where: str, key: str, value: list[Any]) -> ValueError:
    return ValueError(
        f"{where}: {key!r} is {short(value)}: several texts in one row. Write each as a row of its own, with all its "
        "tokens; training packs them itself."
    )
