"""What a message or a row says about its own answer: whether it is to be learned, and whether its end was cut off."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from dflash_lightning.data.read.values import short

# Marks by their plain name (see ``plain``). True, 1 and "true" of the first group say "learn it", of the second
# "do not learn it". The others can be read in two ways, or say more than one bit.
_WEIGHTS = {"weight", "lossweight", "trainweight"}
_LEARN = {
    *("train", "trainable", "training", "istrainable", "istrain", "dotrain", "trainon", "learn", "learnable"),
    *("trainonturn", "loss", "lossmask", "useloss", "calculateloss", "computeloss", "supervise", "supervised"),
    *_WEIGHTS,
}
_SPARE = {"masked", "ismasked", "ignoreloss", "noloss", "skiploss", "notrain", "donottrain", "excludefromloss"}
_LEFT_OUT = {"skip", "skipped", "ignore", "ignored", "exclude", "excluded"}
_REFUSED = {
    "mask": "may mean that the answer is masked out, or that it is the one to learn",
    **dict.fromkeys(_LEFT_OUT, "may mean that the turn is left out of the text, or only of the loss"),
    **dict.fromkeys(("assistantmask", "assistantmasks"), "has a value for every token, but the tokens are made here"),
    **dict.fromkeys(("traindetail", "trainingdetail"), "marks parts of an answer"),
}
# Words of marks under names that nobody can list: a yes or no under such a name is refused, never passed over. A true
# or false beside the second or third row says something about learning only if it is the one that leaves out.
_WORDS = ("train", "loss", "supervis", "learn", "mask")
_AGAINST = ("discard", "drop", "reject", "exclude", "ignore", "invalid", "context", "prefix", "nograd", "stopgrad")
_FOR = ("keep", "include", "valid", "enabled", "target", "label", "sft", "finetun", "grad", "backprop")
# Marks that a whole row may carry as numbers too; others (loss) are statistics there.
_OF_ROW = _LEFT_OUT | _WEIGHTS | _SPARE | (_LEARN - {"loss", "lossmask"})
_LISTS = {"weights", "lossweights", "lossmasks", "masks", "trainables"}
_YES, _NO = {"true", "yes", "on"}, {"false", "no", "off"}

# "finish" is what ``regenerate`` writes.
FINISH = {
    *("finish", "finishreason", "finishreasons", "finishdetails", "finishedby", "stopreason", "stopreasons"),
    *("stoptype", "donereason", "status", "incompletedetails"),
}
# The same as a yes or no.
_ENDED = {"iscomplete", "isfinished", "eot", "endturn", "endofturn"}
_OPEN = {
    *("truncated", "istruncated", "wastruncated", "incomplete", "isincomplete", "partial", "ispartial"),
    *("cutoff", "interrupted", "aborted"),
}
# Reasons after which the text ends where something else than the model ended it.
_CUT = {
    *("length", "maxtokens", "maxnewtokens", "maxoutputtokens", "maxcompletiontokens", "maxlength", "modellength"),
    *("limit", "tokenlimit", "contextlength", "modelcontextwindowexceeded", "incomplete", "truncated"),
    *("contentfilter", "safety", "abort", "aborted", "cancelled", "canceled", "error", "timeout"),
}


@lru_cache(maxsize=4096)
def plain(name: str) -> str:
    """A key or a value without case and separators: ``lossMask``, ``loss_mask`` and ``loss-mask`` are one name."""
    return "".join(c for c in name.lower() if c.isalnum())


def is_message_key(key: str) -> bool:
    """Whether a message's key is one of those read here, which no chat template needs."""
    name = plain(key)
    return any(name in names for names in (_LEARN, _SPARE, _REFUSED, FINISH, _ENDED, _OPEN))


def check_marks(given: Mapping[str, Any], at: str) -> None:
    """Refuse marks of an answer that would be passed over: under a name unknown here, in a nested object, at a part.

    Raises:
        ValueError: there is one that may say "do not learn this"; says where to write it instead.
    """
    for key, value in given.items():
        if key == "content" and isinstance(value, list):
            found = [f"{key}[{i}].{name}" for i, part in enumerate(value) for name in _marks_in(part)]
        else:
            found = [f"{key}.{name}" for name in _marks_in(value)] if not is_message_key(key) else []
            found += [key] if _may_be_mark(key, value) else []
        if found:
            raise ValueError(
                f"{at} has {found[0]}, which may mark an answer as not to be learned and is not read there. Write "
                '"train": false at the message itself, or remove it.'
            )


def _marks_in(value: Any) -> list[str]:
    """Names of the marks in a nested object that do not simply say "learn it"."""
    if not isinstance(value, dict):
        return []
    return [
        key
        for key, mark in value.items()
        if (plain(key) in _LEARN and _bit(mark) is False) or (plain(key) in _SPARE and _bit(mark))
    ]


def _may_be_mark(key: str, value: Any) -> bool:
    """Whether an unknown key of a message reads like a mark and has a yes or no as its value."""
    name = plain(key)
    if is_message_key(key) or _bit(value) is None:
        return False
    if any(word in name for word in _WORDS):
        return True
    word = str(value).lower()  # numbers are scores and classes
    return word in _YES if any(w in name for w in _AGAINST) else word in _NO and any(w in name for w in _FOR)


def is_learned(message: Mapping[str, Any], at: str) -> bool:
    """Whether the marks of an answer let it be supervised; without marks it is.

    Raises:
        ValueError: a mark can be read in two ways, is a fraction, or two marks differ.
    """
    said: dict[str, bool] = {}
    for key, value in message.items():
        name = plain(key)
        if name in _REFUSED and not (name in _LEFT_OUT and _bit(value) is False):
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
        ValueError: a weight that is neither 0 nor 1, a list of marks, or one that can be read in two ways.
    """
    learned = True
    for key, value in given.items():
        name = plain(key)
        bit = _bit(value) if name in _OF_ROW or isinstance(value, bool) else None
        if name in _LISTS or (isinstance(value, list) and name in _LEARN | _SPARE | _LEFT_OUT | {"mask"}):
            why = 'is a list of marks. Write them at the messages, as "train": false'
        elif bit is not None and name in _LEARN | _SPARE | _LEFT_OUT:
            learned &= bit if name in _LEARN else not bit
            continue
        elif name in _WEIGHTS:
            why = f"is {short(value)}, which is not applied. Give whole files a weight in data.train"
        elif name == "mask" and bit is not None:
            why = f"is {short(value)}, which {_REFUSED[name].replace('answer', 'row')}"
        else:
            continue
        raise ValueError(f"{where}: {key!r} {why}; or leave the column out (in data.train: ignore: [{key}]).")
    return learned


def is_cut(given: Mapping[str, Any]) -> bool:
    """Whether a message's finish reason says that it ends where the model did not end it (``length``)."""
    return any(cut for value in finish_reasons(given).values() for cut in value[-1:])


def finish_reasons(given: Mapping[str, Any]) -> dict[str, list[bool]]:
    """By key, for each reason under it (one, or a list of them), whether it says that something was cut off.

    A reason is a text, an object with its ``type`` (SGLang) or ``reason`` (OpenAI), or a yes or no (``truncated``,
    ``eot``). It may stand one level down (``meta_info``).
    """
    found = {}
    for key, value in given.items():
        if plain(key) in _ENDED | _OPEN:
            found[key] = [_bit(value) is (plain(key) in _OPEN)]
        elif plain(key) in FINISH and isinstance(value, str | list | dict):
            found[key] = [_says_cut(reason) for reason in (value if isinstance(value, list) else [value])]
        elif isinstance(value, dict):
            inner = {name: reason for name, reason in value.items() if plain(name) in FINISH | _ENDED | _OPEN}
            found.update({f"{key}.{name}": cut for name, cut in finish_reasons(inner).items()})
    return found


def _says_cut(reason: Any) -> bool:
    reason = reason.get("type", reason.get("reason")) if isinstance(reason, dict) else reason
    if not isinstance(reason, str):
        return False
    return plain(reason.rpartition(".")[2]).removeprefix("finishreason") in _CUT  # FinishReason.LENGTH and the like


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
