"""A comparison of methods as ``dflash compare --json`` writes it, read for a page: what is absent is a gap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_lightning.pages.numbers import Estimate, known

ALL = "all"  # the domain that pools the others
_VERSION = 1


@dataclass(frozen=True)
class Method:
    """One method of a comparison; ``name`` is short where all have the same beginning."""

    name: str
    entry: Mapping[str, Any]
    baseline: bool

    @property
    def seeds(self) -> list[Any]:
        """The seeds that its figures are means over."""
        return list(self.entry.get("seeds") or [])

    @property
    def gaps(self) -> list[str]:
        """What is missing of it, in words."""
        return [str(gap) for gap in self.entry.get("gaps") or []]

    def tau(self, decoding: str, domain: str = ALL) -> Estimate | None:
        """Tokens per round."""
        return Estimate.read(_at(self.entry, "tau", decoding, domain))

    def paired(self, decoding: str) -> Estimate | None:
        """Its tau less the baseline's, prompt by prompt."""
        return Estimate.read(_at(self.entry, "paired", decoding))

    def expected(self, decoding: str) -> Estimate | None:
        """Tau as it was predicted without decoding."""
        found = _at(self.entry, "expected_tau", decoding)
        pooled = found.get(ALL) if isinstance(found, Mapping) and "mean" not in found else found
        return Estimate.read(pooled)

    def speed(self, batch: str, figure: str) -> Estimate | None:
        """A figure of its speed, at a batch size."""
        return Estimate.read(_at(self.entry, "speed", batch, figure))

    def figure(self, name: str) -> Estimate | None:
        """A figure of its training: ``loss``, ``cpu_s``, ``parameters``."""
        return Estimate.read(self.entry.get(name))

    def count(self, *path: str) -> int | None:
        """A whole number somewhere in its entry."""
        found = known(_at(self.entry, *path))
        return None if found is None else int(found)

    @property
    def identical(self) -> tuple[int, int] | None:
        """How many outputs were plain decoding's own, of how many that were compared."""
        pair = [known(value) for value in self.entry.get("identical") or []]
        if len(pair) != 2 or pair[0] is None or pair[1] is None:
            return None
        return int(pair[0]), int(pair[1])

    @property
    def survival(self) -> list[float | None]:
        """Share of rounds whose drafts stand up to each slot."""
        found = self.entry.get("survival")
        values = found.get(next(iter(found), "")) if isinstance(found, Mapping) else found
        estimates = [Estimate.read(value) for value in values or []]
        return [None if e is None else e.mean for e in estimates]


@dataclass(frozen=True)
class Comparison:
    """All methods of a comparison, in its order."""

    methods: list[Method]
    baseline: str | None
    protocol: Mapping[str, Any]
    differences: Mapping[str, list[str]]
    gaps: list[str]
    about: Mapping[str, Any]
    correlations: Mapping[str, Any]

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Comparison:
        """What ``dflash compare --json`` wrote.

        Raises:
            ValueError: it is of another version, or compares nothing.
        """
        if content.get("version") != _VERSION:
            raise ValueError(
                f"comparison: version {content.get('version')!r} cannot be shown, only {_VERSION}. "
                "Write it anew: dflash compare RUNS... --json FILE."
            )
        entries = [entry for entry in content.get("methods") or [] if isinstance(entry, Mapping)]
        if not entries:
            raise ValueError("comparison: it holds no method. Give runs that were measured: dflash compare RUNS...")
        names = [str(entry.get("name")) for entry in entries]
        cut, baseline = len(common_folder(names)), content.get("baseline")
        return cls(
            [Method(name[cut:], e, name == baseline) for name, e in zip(names, entries, strict=True)],
            None if baseline is None else str(baseline)[cut if str(baseline) in names else 0 :],
            content.get("protocol") or {},
            {
                str(name)[cut if name in names else 0 :]: said
                for name, said in (content.get("differences") or {}).items()
            },
            [str(gap) for gap in content.get("gaps") or []],
            {name: content[name] for name in ("target", "machine", "common_overrides") if content.get(name)},
            content.get("rank_correlation") or {},
        )

    @property
    def decodings(self) -> list[str]:
        """Ways of decoding that any method was measured with."""
        return _names(method.entry.get("tau") for method in self.methods)

    def domains(self, decoding: str) -> list[str]:
        """Domains that any method was measured on, the pool of all first."""
        found = _names(_at(method.entry, "tau", decoding) for method in self.methods)
        return sorted(found, key=lambda name: name != ALL)

    @property
    def batches(self) -> list[str]:
        """Batch sizes that any method was timed at, the smallest first."""
        return sorted(_names(method.entry.get("speed") for method in self.methods), key=_size)

    @property
    def standard(self) -> Method | None:
        """The baseline, where it is among the methods."""
        return next((method for method in self.methods if method.baseline), None)


def common_folder(names: list[str]) -> str:
    """The folder that all names begin with, its slash included; empty where there is none, or a single name."""
    folder = names[0].rpartition("/")[0] + "/"
    return folder if len(names) > 1 and len(folder) > 1 and all(name.startswith(folder) for name in names) else ""


def _at(tree: Any, *path: str) -> Any:
    for key in path:
        if not isinstance(tree, Mapping):
            return None
        tree = tree.get(key)
    return tree


def _names(mappings: Any) -> list[str]:
    """Keys of all mappings, each once, in the order in which they come."""
    return list(dict.fromkeys(str(key) for mapping in mappings if isinstance(mapping, Mapping) for key in mapping))


def _size(text: str) -> tuple[bool, float | str]:
    return (False, float(text)) if text.isdigit() else (True, text)
