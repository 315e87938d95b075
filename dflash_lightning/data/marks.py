"""What a message or a row says about its own answer: whether it is to be learned, and whether its end was cut off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_lightning.data.values import short

# Marks by their plain name (see ``plain``). True, 1 and "true" of the first group say "learn it", of the second
# "do not learn it". The third group can be read in both ways, or says more than one bit.
_LEARN = {
    *("train", "trainable", "training", "istrainable", "loss", "lossmask", "weight", "lossweight", "trainweight"),
    *("supervise", "supervised", "calculateloss", "computeloss"),
}
_SPARE = {"masked", "ismasked", "ignoreloss", "nolossmask"}
_REFUSED = {
    "mask": "may mean that the answer is masked out, or that it is the one to learn",
    "skip": "may mean that the turn is left out of the text, or only of the loss",
    "skipped": "may mean that the turn is left out of the text, or only of the loss",
    "assistantmask": "has a value for every token, but the tokens are made here",
    "assistantmasks": "has a value for every token, but the tokens are made here",
    "traindetail": "marks parts of an answer",
    "trainingdetail": "marks parts of an answer",
}
# Marks that a whole row may carry. Others (loss, mask) are there mostly statistics or per-token values.
_OF_ROW = {"train", "trainable", "training", "istrainable", "weight", "lossweight", "trainweight", "skip", "skipped"}
_YES, _NO = {"true", "yes", "on"}, {"false", "no", "off"}

# "finish" is what ``regenerate`` writes.
FINISH = {"finish", "finishreason", "stopreason", "finishedby"}
# Reasons after which the text ends where something else than the model ended it.
_CUT = {
    *("length", "maxtokens", "maxnewtokens", "maxoutputtokens", "maxcompletiontokens", "maxlength", "modellength"),
    *("tokenlimit", "contextlength", "modelcontextwindowexceeded", "incomplete", "truncated"),
    *("contentfilter", "safety", "abort", "aborted", "cancelled", "canceled", "error", "timeout"),
}


def plain(name: Any) -> str:
    """A key or a value without case and separators: ``lossMask``, ``loss_mask`` and ``loss-mask`` are one name."""
    return "".join(c for c in str(name).lower() if c.isalnum())


def is_message_key(key: str) -> bool:
    """Whether a message's key is one of those read here, which no chat template needs."""
    name = plain(key)
    return name in _LEARN or name in _SPARE or name in _REFUSED or name in FINISH


def is_learned(message: Mapping[str, Any], at: str) -> bool:
    """Whether the marks of an answer let it be supervised; without marks it is.

    Raises:
        ValueError: a mark can be read in two ways, is a fraction, or two marks differ.
    """
    said: dict[str, bool] = {}
    for key, value in message.items():
        name = plain(key)
        if name in _REFUSED and not (name.startswith("skip") and _bit(value) is False):
            raise ValueError(
                f"{at} has {key} {short(value)}, which is not applied: it {_REFUSED[name]}. Write "
                '"train": false at answers that are not to be learned, or remove the mark.'
            )
        if name in _LEARN or name in _SPARE:
            bit = _bit(value)
            if bit is None:
                raise ValueError(
                    f"{at} has {key} {short(value)}, which is not applied: an answer is learned or not. Use 1 or 0 "
                    "(true or false); to use whole files more or less often give them a weight in data.train."
                )
            said[key] = bit if name in _LEARN else not bit
    if len(set(said.values())) > 1:
        raise ValueError(f"{at} has marks that differ: {', '.join(said)}. Remove all but one.")
    return next(iter(said.values()), True)


def row_is_learned(given: Mapping[str, Any], where: str) -> bool:
    """Whether a row's own marks let its answers be supervised (``trainable: false`` beside the conversation).

    Raises:
        ValueError: a weight that is neither 0 nor 1.
    """
    learned = True
    for key, value in given.items():
        name = plain(key)
        bit = _bit(value) if name in _OF_ROW else None
        if bit is not None:
            learned &= not bit if name in ("skip", "skipped") else bit
        elif name in _OF_ROW and name.endswith("weight"):
            raise ValueError(
                f"{where}: the row has {key} {short(value)}, which is not applied. Give files a weight in data.train, "
                f"or leave the column out there with ignore: [{key}]."
            )
    return learned


def is_cut(given: Mapping[str, Any]) -> bool:
    """Whether a message's finish reason says that it ends where the model did not end it (``length``)."""
    return any(cut for value in finish_reasons(given).values() for cut in value[-1:])


def finish_reasons(given: Mapping[str, Any]) -> dict[str, list[bool]]:
    """By key, for each reason under it (a text, or a list of texts), whether it says that something was cut off."""
    found = {}
    for key, value in given.items():
        if plain(key) in FINISH and isinstance(value, str | list):
            reasons = value if isinstance(value, list) else [value]
            found[key] = [isinstance(reason, str) and plain(reason) in _CUT for reason in reasons]
    return found


def _bit(value: Any) -> bool | None:
    """A mark's value as yes or no; null for anything between or beside them."""
    if isinstance(value, str):
        text = value.strip().lower()
        if text in _YES or text in _NO:
            return text in _YES
        try:
            value = float(text)
        except ValueError:
            return None
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    return None
