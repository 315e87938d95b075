"""What is measured of every run of a bench, as a recipe says it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.errors import SettingError
from dflash_lightning.recipe.folders import group_options
from dflash_lightning.recipe.load import load_recipe
from dflash_lightning.recipe.make import make
from dflash_lightning.recipe.tree import plain_tree

# Settings of a recipe's own decoding that belong to the method: how many slots its drafter is fed.
FED = ("block_size", "untrained_slots")


def fed_by(recipe: dict[str, Any]) -> dict[str, Any]:
    """What a resolved recipe says of ``FED``."""
    node = recipe.get("decoding")
    return {key: node[key] for key in FED if node.get(key) is not None} if isinstance(node, dict) else {}


@dataclass(frozen=True)
class SpeedSettings:
    """How drafted decoding is timed beside plain decoding, greedily.

    ``prompts`` are timed at batch 1, the first of every domain in turns. A larger batch takes as many as fill it.
    """

    prompts: int = 4
    batch_sizes: tuple[int, ...] = (1, 8)
    compile: bool = False  # compile the draft step for the timing

    def __post_init__(self) -> None:
        for name, numbers in (("prompts", (self.prompts,)), ("batch_sizes", self.batch_sizes)):
            if bad := [number for number in numbers if not isinstance(number, int) or number < 1]:
                raise SettingError(f"measure.speed.{name}", f"{bad[0]!r} is not a count", "Use 1 or more")

    @classmethod
    def read(cls, stated: dict[str, Any] | None) -> SpeedSettings | None:
        """What a recipe states: null, or a mapping of the fields above.

        Raises:
            ValueError: an unknown key, or a value that is no count.
        """
        if stated is None:
            return None
        known = [one.name for one in fields(cls)]
        if unknown := sorted(set(stated) - set(known)):
            raise SettingError(f"measure.speed.{unknown[0]}", "unknown key", f"Use some of {known}")
        batches = stated.get("batch_sizes", cls.batch_sizes)
        if not isinstance(batches, list | tuple):
            raise SettingError("measure.speed.batch_sizes", f"{batches!r} is no list", "Write [1, 8]")
        return cls(**{**stated, "batch_sizes": tuple(batches)})


@dataclass(frozen=True)
class Measure:
    """Held-out prompts by domain, the ways to decode them, and what is timed and compared beside.

    Tau is counted at ``batch_size`` over all prompts with every one of ``decodings`` (options of ``recipes/decoding``).
    Plain decoding is slow and the same for all methods: it is done for the ``compared`` prompts, with the first of the
    decodings whose output must be the plain one's, and for those of ``speed``. Both take prompts of every domain in
    turns.
    """

    prompts: dict[str, str]  # a JSONL file of held-out prompts per domain
    limit: int | None = None  # prompts of each domain; null: all
    decodings: list[str] = field(default_factory=lambda: ["greedy", "sampling"])
    max_new_tokens: int = 48  # longest answer
    batch_size: int = 8  # prompts decoded at once where tau is counted
    compared: int = 12  # prompts whose output is compared with plain decoding's
    speed: dict[str, Any] | None = field(default_factory=dict)  # prompts, batch_sizes, compile; null times nothing
    expected: dict[str, Any] | None = None  # rows that the target wrote, by decoding, for the expected tau

    def __post_init__(self) -> None:
        if not self.prompts:
            raise SettingError("measure.prompts", "no domain is named", do="Write {code: FILE, chat: FILE}")
        known = group_options()["decoding"]
        for name in self.decodings:
            if name not in known:
                raise SettingError("measure.decodings", f"there is no option decoding={name}", f"Use some of {known}")
        if not self.decodings or len(set(self.decodings)) != len(self.decodings):
            raise SettingError("measure.decodings", f"{self.decodings} names none, or one twice", do="Name each once")
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise SettingError(f"measure.{name}", f"{getattr(self, name)} is not a count", "Use 1 or more")
        if unknown := sorted(set(self.expected or {}) - set(known)):
            raise SettingError("measure.expected", f"there is no option decoding={unknown[0]}", f"Use some of {known}")
        _ = self.timing

    @property
    def timing(self) -> SpeedSettings | None:
        """``speed`` as settings; null where nothing is timed."""
        return SpeedSettings.read(self.speed)

    def decoding(
        self,
        name: str,
        *,
        batch_size: int | None = None,
        compile: bool = False,
        fed: Mapping[str, Any] = MappingProxyType({}),
    ) -> DecodingSettings:
        """The settings of one of the decodings, with this bench's lengths; noise of seed 0, whatever a run's seed.

        ``fed`` is how a method's drafter is fed: settings of ``FED``.
        """
        changed = {
            "max_new_tokens": self.max_new_tokens,
            "batch_size": batch_size or self.batch_size,
            "compile": compile,
            **fed,
        }
        settings = make({**_option(name), **changed})
        assert isinstance(settings, DecodingSettings)
        return settings

    def ways(self, recipe: dict[str, Any]) -> Iterator[tuple[str, DecodingSettings]]:
        """All decodings with their settings, the drafter being fed as a resolved ``recipe`` says."""
        for name in self.decodings:
            yield name, self.decoding(name, fed=fed_by(recipe))

    def summary(self) -> dict[str, Any]:
        """All but the prompts, as plain values; ``decodings`` with their own settings, and none of a method's."""
        timing = self.timing
        return {
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.batch_size,
            "limit": self.limit,
            "compared": self.compared,
            "speed": None if timing is None else {name: _plain(value) for name, value in vars(timing).items()},
            "decodings": {name: self.decoding(name).summary() for name in self.decodings},
        }


@lru_cache(maxsize=64)
def _option(name: str) -> dict[str, Any]:
    """The node of an option of ``recipes/decoding``; nobody may change it."""
    cfg = load_recipe("dflash", [f"decoding={name}", "run_dir=null"])  # nothing is kept beside any run
    node: dict[str, Any] = plain_tree(cfg, [])["decoding"]
    return node


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
