"""What is wrong with a recipe, in words."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_lightning.errors import SettingError, close_match, ended, hint_for, nearest

__all__ = ["Fault", "RecipeError", "close_match", "fault_of", "hint_for", "nearest"]

# Settings without a group, and whole groups, that a message may name.
_TOP_LEVEL = ("init_from", "draft_vocabulary", "seed", "loss", "block", "conditioning", "drafter", "head")
_NO_ADVICE = "Change it"


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a recipe: where, what, what is allowed there, what to do."""

    where: str
    what: str
    do: str

    def __str__(self) -> str:
        return ended(f"{self.where}: {self.what}. {self.do[:1].upper()}{self.do[1:]}")


class RecipeError(ValueError):
    """All faults of a recipe in one message."""

    def __init__(self, faults: list[Fault], recipe: str = "the recipe") -> None:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        super().__init__("\n".join([f"{count} in {recipe}:", *(f"  - {fault}" for fault in faults)]))
        self.faults = faults


def fault_of(error: ValueError, where: str) -> Fault:
    """An error that was raised for the setting ``where``, as a fault. A ``SettingError`` says itself where it stands.

    Of any other error (a class of one's own, a library) the first sentence is what is wrong, the rest what to do.
    """
    if isinstance(error, SettingError):
        return Fault(_key(error.where, where), error.what, error.advice or _NO_ADVICE)
    what, _, do = str(error).partition(". ")
    key, colon, rest = what.partition(": ")
    if colon and " " not in key:  # the message names its key itself
        where, what = _key(key, where), rest
    return Fault(where, what.rstrip("."), do.rstrip(".") or _NO_ADVICE)


def _key(named: str, where: str) -> str:
    """The key that an error names, if it is one of a recipe; else where the error came from."""
    return named if "." in named or named in _TOP_LEVEL else where
