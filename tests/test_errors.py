"""The one error for settings: its fields make the message, and a recipe's faults are read from the fields."""

from __future__ import annotations

import pytest

from dflash_lightning.errors import SettingError
from dflash_lightning.recipe.faults import fault_of


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("a.b", "0 is no count", "Use 1 or more"), "a.b: 0 is no count. Use 1 or more."),
        (("a.b", "0 is no count.", "", "Change c."), "a.b: 0 is no count. Change c."),
        (("a.b", "0", "Use 1", "Or change c"), "a.b: 0. Use 1. Or change c."),
        (("a.b", "it is damaged"), "a.b: it is damaged."),
    ],
)
def test_the_message_is_made_of_the_fields(fields: tuple[str, ...], message: str) -> None:
    error = SettingError(*fields)
    assert str(error) == message and isinstance(error, ValueError)


def test_a_fault_has_the_fields_however_they_are_worded() -> None:
    """A sentence that parsing would cut in the wrong place."""
    error = SettingError("loss.decay", "0. is no decay: it is nothing", "Use 4 or 5", "See sec. 4.2")
    fault = fault_of(error, "loss.mine")
    assert (fault.where, fault.what) == ("loss.decay", "0. is no decay: it is nothing")
    assert fault.do == "Use 4 or 5. See sec. 4.2"
    assert fault_of(SettingError("width", "0 is no width"), "head").where == "head"  # no key of a recipe


def test_other_errors_are_read_as_sentences() -> None:
    fault = fault_of(ValueError("head.rank: 0 is no rank. Use 1 or more."), "head")
    assert (fault.where, fault.what, fault.do) == ("head.rank", "0 is no rank", "Use 1 or more")
    plain = fault_of(ValueError("something is wrong"), "head")
    assert (plain.where, plain.what, plain.do) == ("head", "something is wrong", "Change it")
