"""The one error for a setting that cannot be used: where it stands, what is wrong, what is allowed, what to do."""

from __future__ import annotations


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
        super().__init__(f"{where}: {'. '.join(filter(None, (self.what, self.advice)))}.")

    @property
    def advice(self) -> str:
        """What is allowed and what to do, without the last full stop."""
        return ". ".join(sentence for sentence in (self.allowed, self.do) if sentence)


def _bare(sentence: str) -> str:
    return sentence.rstrip().removesuffix(".")
