"""What classes take, read from source text: certain, or no answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from dflash_lightning.recipe.arguments import by_import, from_source, source_defaults
from dflash_lightning.recipe.hints import fits
from dflash_lightning.recipe.source import find_definition, read_signature

MODULE = '''
from __future__ import annotations
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, Optional, Union
from {name}_base import Base, Size
if TYPE_CHECKING:
    from pathlib import Path

Mode = Literal["a", "b"]

def changes(function):
    return function

class Plain(Base):
    """Doc.

    Args:
        width: how wide
            it is. More.
    """
    def __init__(
        self, width: int, *, mode: Mode = "a", size: Size = 1.5, any_of: "Optional[list[int]]" = None
    ) -> None: ...

class Child(Plain):
    pass

class Open:
    def __init__(self, a: float = 1.0, **rest: Any) -> None: ...

@dataclass(frozen=True)
class Record:
    a: int
    b: Union[str, None] = None  # what b is
    def method(self) -> int: return 1

@dataclass
class Doubtful:
    a: list[int] = field(default_factory=list)

class Decorated:
    @changes
    def __init__(self, a: int) -> None: ...

class Guarded:
    def __init__(self, place: Path | None = None) -> None: ...

def make(a: int, b: bool = True) -> Plain: ...
'''
BASE = """
from typing import Union
Size = Union[int, float]
class Base:
    def __init__(self, a: int) -> None: ...
"""


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """An importable module of its own for every test, that nobody imports here."""
    name = f"own_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(name=name))
    (tmp_path / f"{name}_base.py").write_text(BASE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.mark.parametrize(
    ("what", "required", "names", "open_ended"),
    [
        ("Plain", {"width"}, ["width", "mode", "size", "any_of"], False),
        ("Child", {"width"}, ["width", "mode", "size", "any_of"], False),
        ("Open", set(), ["a"], True),
        ("Record", {"a"}, ["a", "b"], False),
        ("make", {"a"}, ["a", "b"], False),
        ("Guarded", set(), ["place"], False),
    ],
)
def test_source_and_import_agree(what: str, required: set[str], names: list[str], open_ended: bool, name: str) -> None:
    told = from_source(f"{name}.{what}")
    assert name not in sys.modules
    assert told is not None
    assert (told.required, list(told.hints), told.open_ended) == (required, names, open_ended)
    known = by_import(f"{name}.{what}")
    assert (known.required, list(known.hints), known.open_ended) == (required, names, open_ended)
    for key, hint in known.hints.items():
        for value in (1, 1.5, "a", "c", True, None, [1], ["a"], {}):
            assert fits(value, told.hints[key]) == fits(value, hint), (key, value)


@pytest.mark.parametrize("what", ["Doubtful", "Decorated", "nothing_here"])
def test_a_doubt_is_no_answer(what: str, name: str) -> None:
    assert from_source(f"{name}.{what}") is None


@pytest.mark.parametrize("path", ["", "x", 3, None, "json.decoder.c_scanstring"])
def test_what_cannot_be_read_is_no_answer(path: Any) -> None:
    assert from_source(path) is None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("dflash_lightning.block.Anchord", "dflash_lightning.block has no 'Anchord', but 'Anchored'"),
        ("dflash_lightning.data.DraftDta", "but 'DraftData'"),
        ("no_such_package.part.Thing", "No module named 'no_such_package'"),
        ("dflash_lightning.blok.Anchored", "No module named 'dflash_lightning.blok'"),
    ],
)
def test_a_path_that_leads_nowhere_is_certain(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_source(path)
    with pytest.raises(ValueError, match=message):
        by_import(path)


def test_a_name_is_followed_to_its_definition() -> None:
    found = find_definition("lightning.pytorch.Trainer")
    assert found is not None and found.path == "lightning.pytorch.trainer.trainer.Trainer"
    found = find_definition("dflash_lightning.data.DraftData")  # of a package whose names load on first use
    assert found is not None and found.path == "dflash_lightning.data.datamodule.DraftData"


def test_defaults_comments_and_documents_are_kept(name: str) -> None:
    assert source_defaults(f"{name}.Plain") == {"mode": "a", "size": 1.5, "any_of": None}
    signature = read_signature(f"{name}.Record")
    assert signature is not None and signature.parameters["b"].note == "what b is"
    plain = from_source(f"{name}.Plain")
    assert plain is not None and plain.hints["mode"] == Literal["a", "b"]
