"""The one error for settings: its fields make the message, and a recipe's faults are read from the fields."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import dflash_lightning
from dflash_lightning.errors import SettingError
from dflash_lightning.recipe.faults import fault_of


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("a.b", "0 is no count", "Use 1 or more"), "a.b: 0 is no count. Use 1 or more."),
        (("a.b", "0 is no count.", "", "Change c."), "a.b: 0 is no count. Change c."),
        (("a.b", "0", "Use 1", "Or change c"), "a.b: 0. Use 1. Or change c."),
        (("a.b", "it is damaged"), "a.b: it is damaged."),
        (("a.b", "it lacks c", "", "Run: pip install c"), "a.b: it lacks c. Run: pip install c"),
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


KEY = re.compile(
    r"(block|conditioning|drafter|head|loss|decoding|optim|trainer|init_from|draft_vocabulary|target|data|draft)(\.|: )"
)
PARTS = ("block", "conditioning", "drafter", "head", "loss", "decoding", "training", "model", "target", "data")


def test_what_is_wrong_with_a_setting_is_said_in_fields_and_not_in_a_sentence() -> None:
    """A sentence would have to be parsed to become a fault of a recipe."""
    package = Path(dflash_lightning.__file__).parent
    files = [package / "module.py", *(file for part in PARTS for file in (package / part).rglob("*.py"))]
    raised = [node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Raise)]
    assert len(files) > 50 and len(raised) > 50, "the walk found almost nothing: it tests nothing"
    calls = [node.exc for node in raised if isinstance(node.exc, ast.Call)]
    plain = [ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func) == "ValueError" and call.args]
    assert [sentence for sentence in plain if KEY.match(sentence.lstrip("f").strip("'\""))] == []
