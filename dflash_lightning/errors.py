"""The one error for a setting that cannot be used: where it stands, what is wrong, what is allowed, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class SettingError(ValueError):
    """A setting that cannot be used. The message is made of the fields, here and nowhere else.

    Args:
        where: the setting as its user writes it: a dotted key of a recipe, or an option of a command.
        what: what is wrong with it, with the value.
        allowed: which values are possible, as a sentence ("Use 1 or more").
        do: what to do where that is more than choosing such a value, as a sentence.
    """

    def __init__(self, where: str, what: str, allowed: str = "", do: str = "") -> None:
        self.where, self.what, self.allowed, self.do = where, _bare(what), _bare(allowed), _bare(do)
        super().__init__(f"{where}: {ended('. '.join(filter(None, (self.what, self.advice))))}")

    @property
    def advice(self) -> str:
        """What is allowed and what to do, without the last full stop."""
        return ". ".join(sentence for sentence in (self.allowed, self.do) if sentence)


def ended(sentences: str) -> str:
    """With a full stop, but behind a command that is to be copied ("Run: pip install x")."""
    return sentences if sentences.rpartition(". ")[2].startswith("Run: ") else f"{sentences}."


def _bare(sentence: str) -> str:
    return sentence.rstrip().removesuffix(".")


def hint_for(name: str, known: Iterable[str]) -> str:
    """``Did you mean 'lr'? Allowed: ...``"""
    known = sorted(known)
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    guess = f"Did you mean {near[0]!r}? " if near else ""
    return f"{guess}Allowed: {', '.join(known) if known else 'nothing'}"


def nearest(name: str, known: Iterable[str]) -> str:
    """``Did you mean 'dflash', 'dflare' or 'dfly'?``: up to three of many names; empty where none is near."""
    near = [repr(one) for one in get_close_matches(name, sorted(known), n=3, cutoff=0.5)]
    return f"Did you mean {' or '.join(filter(None, (', '.join(near[:-1]), near[-1])))}? " if near else ""


def close_match(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` is most likely a slip of the pen for; null where none is near."""
    return next(iter(get_close_matches(name, sorted(known), n=1)), None)
