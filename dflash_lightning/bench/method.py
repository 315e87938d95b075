"""Which method a run is of: its recipe and what was changed on the command line, whatever the seed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Of a run, not of its method.
_APART = ("seed", "run_dir", "measure")


@dataclass(frozen=True)
class Method:
    """A recipe's name and the overrides that belong to the method."""

    recipe: str
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """``bench/dspark optim.lr=1e-3``."""
        return self.name_without(())

    def name_without(self, common: Iterable[str]) -> str:
        """The name without overrides that all of several methods have."""
        known = set(common)
        return " ".join([self.recipe, *(word for word in self.overrides if word not in known)])

    @classmethod
    def of_run(cls, state: dict[str, Any], recipe: dict[str, Any]) -> Method:
        """The method of a run folder, from its ``run.json`` and its resolved recipe."""
        asked = state.get("asked") if isinstance(state.get("asked"), dict) else {}
        name = str(recipe.get("name") or (asked or {}).get("recipe") or "?")
        return cls(name, tuple(of_method(word for word in (asked or {}).get("overrides", ()))))


def of_method(words: Iterable[str]) -> list[str]:
    """The overrides that make a method; a seed, a folder and what is measured do not."""
    return [word for word in words if _key(word) not in _APART and word.partition("=")[0] != "name"]


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0].partition(".")[0]


def short_name(recipe: str) -> str:
    """A recipe's name as it was given, or that of a file: ``mine`` of ``folder/mine.yaml``."""
    path = Path(recipe)
    return path.stem if path.suffix in (".yaml", ".yml") else recipe


def common_overrides(methods: Iterable[Method]) -> list[str]:
    """Overrides that all of the methods have, in the order of the first."""
    first, *others = methods
    return [word for word in first.overrides if all(word in other.overrides for other in others)]
