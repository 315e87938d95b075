"""Where training rows come from: files, packages, patterns, saved or hub data sets, mixed with weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from glob import glob, has_magic
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dflash_lightning.data.read.compression import optional
from dflash_lightning.data.read.records import FORMATS, BadRecord, Format, Record, format_of, read_records
from dflash_lightning.data.read.rows import KINDS, Kind, Row, parse_record
from dflash_lightning.data.read.tables import load_hub, read_dataset
from dflash_lightning.errors import SettingError
from dflash_lightning.files import PACKAGE_PREFIX, file_digest, find_file

HUB_PREFIX = "hf://"
TrainFiles = str | dict[str, Any] | Sequence[str | dict[str, Any]]


@dataclass(frozen=True)
class Source:
    """One entry of ``data.train``.

    Args:
        path: a file, a pattern of files (``shards/*.jsonl.gz``), ``package://name/file``, a folder that ``datasets``
            saved, or ``hf://owner/name`` on the hub.
        weight: how often each row is used per epoch: 2 uses every row twice (with anchors drawn anew), 0.25 a quarter
            of the rows, 2.5 all rows twice and half of them once more. Which rows those are is drawn row by row from
            the seed, once for the whole run, so that every epoch has equally many steps.
        limit: read only the first so many rows (before weighting).
        format: ``jsonl``, ``json``, ``parquet`` or ``dataset``; null goes by the name.
        kind: the kind of row (see ``data.rows.KINDS``), for records that could be several; null finds it out.
        split: split of a data set, "train" unless given.
        subset: the configuration of a hub data set.
        revision: commit or tag of a hub data set; give one for a run that can be repeated.
        ignore: columns that are not read, although they say something about the conversation (see ``data.beside``).
    """

    path: str
    weight: float = 1.0
    limit: int | None = None
    format: Format | None = None
    kind: Kind | None = None
    split: str | None = None
    subset: str | None = None
    revision: str | None = None
    ignore: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The path, with the weight where it is not 1."""
        return self.path if self.weight == 1 else f"{self.path} (weight {self.weight:g})"

    def settings(self) -> dict[str, Any]:
        """All fields, by name, as JSON has them."""
        return {**asdict(self), "ignore": list(self.ignore)}

    @property
    def is_hub(self) -> bool:
        """Whether it is a data set of the hub."""
        return self.path.startswith(HUB_PREFIX)

    def files(self, setting: str = "data.train") -> list[Path]:
        """The files behind the path, sorted; a saved data set is one folder, a hub data set none.

        Raises:
            ValueError: there is no such file.
        """
        if self.is_hub:
            return []
        path = Path(self.path).expanduser()
        if path.is_dir():
            return [path]
        if self.path.startswith(PACKAGE_PREFIX) or not has_magic(self.path) or path.is_file():
            return [find_file(self.path, setting=setting)]
        found = [Path(name) for name in sorted(glob(str(path), recursive=True)) if Path(name).is_file()]
        if not found:
            raise SettingError(
                setting, f"no file matches {self.path} (looked from {Path.cwd()})", do="Check the pattern"
            )
        return found

    def parts(self, setting: str = "data.train") -> list[Path]:
        """Every single file behind the path, those of a saved data set's folder too."""
        found: list[Path] = []
        for path in self.files(setting):
            found += sorted(part for part in path.rglob("*") if part.is_file()) if path.is_dir() else [path]
        return found

    def formats(self, setting: str = "data.train") -> list[tuple[Path, Format]]:
        """Files with what they hold; refuses settings that do not apply to it."""
        formats = [(file, self.format or format_of(file)) for file in self.files(setting)]
        for file, format in formats:
            if file.is_dir() != (format == "dataset"):
                what = "a folder" if file.is_dir() else "a file"
                raise SettingError(setting, f"{file} is {what}, so its format cannot be {format!r}", do="Remove format")
        if self.split is not None and not self.is_hub and any(format != "dataset" for _, format in formats):
            raise SettingError(setting, f"split does not apply to {self.path}, which is no data set", do="Remove it")
        return formats

    def check(self, setting: str = "data.train") -> None:
        """Refuse, before anything is read, files that are not there and packages that are not installed."""
        if self.is_hub:
            optional("datasets", f"{setting}: {self.path}")
        for file, format in self.formats(setting):
            if format == "parquet":
                optional("pyarrow", f"{setting}: {file}")
            elif format == "dataset":
                optional("datasets", f"{setting}: {file}")

    def records(self, setting: str = "data.train") -> Iterator[Record | BadRecord]:
        """Records of all its files in order, the first ``limit`` of them."""
        yield from islice(self._all_records(setting), self.limit)

    def good_rows(self, setting: str = "data.train") -> Iterator[Row]:
        """Rows that can be read, weights aside."""
        for record in self.records(setting):
            row = record if isinstance(record, BadRecord) else self.parse(record)
            if not isinstance(row, BadRecord):
                yield row

    def parse(self, record: Record) -> Row | BadRecord:
        """The row that a record holds, read as the kind that this source says, or what is wrong with it."""
        try:
            return parse_record(record.value, record.where, self.kind, self.ignore)
        except ValueError as error:
            return BadRecord(record.file, record.line, str(error).removeprefix(f"{record.where}: "))

    def _all_records(self, setting: str) -> Iterator[Record | BadRecord]:
        if self.is_hub:
            for number, value in enumerate(read_dataset(self._hub()), start=1):
                yield Record(self.path, number, value)
        for file, format in self.formats(setting):
            yield from read_records(file, format, split=self.split)

    def _hub(self) -> Any:
        name = self.path.removeprefix(HUB_PREFIX)
        return load_hub(name, subset=self.subset, split=self.split, revision=self.revision)

    def digest(self, setting: str = "data.train") -> str:
        """sha256 of the content of everything that is read (not of names or times, which may lie)."""
        files = [Path(entry["filename"]) for entry in self._hub().cache_files] if self.is_hub else self.parts(setting)
        return hashlib.sha256("".join(file_digest(file) for file in files).encode()).hexdigest()


def make_sources(train: TrainFiles, *, limit: int | None = None, setting: str = "data.train") -> list[Source]:
    """Sources of ``data.train``: a path, a mapping (see ``Source``), or a list of these; ``limit`` where they set none.

    Raises:
        ValueError: an unknown key or an impossible value; nothing is read for it.
    """
    entries = [train] if isinstance(train, str | Mapping) else list(train)
    if not entries:
        raise SettingError(setting, "names no file", do="Give a file or a list of files")
    many = not isinstance(train, str | Mapping)
    return [_make_source(entry, limit, f"{setting}[{i}]" if many else setting) for i, entry in enumerate(entries)]


def _make_source(entry: Any, limit: int | None, where: str) -> Source:
    if isinstance(entry, str):
        return Source(entry, limit=limit)
    known = [field.name for field in fields(Source)]
    if not isinstance(entry, Mapping) or not isinstance(entry.get("path"), str):
        raise SettingError(
            where, f"{entry!r} names no file", do=f"Write a path, or a mapping with path: and {known[1:]}"
        )
    for key in entry:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known keys: {known}."
            raise ValueError(f"{where}.{key}: unknown key of a source. {hint}")
    _check_values({field.name: entry.get(field.name, field.default) for field in fields(Source)}, where)
    own = {"weight": float(entry.get("weight", 1)), "ignore": tuple(entry.get("ignore") or ())}
    return Source(**{"limit": limit, **entry, **own})


def _check_values(values: Mapping[str, Any], where: str) -> None:
    weight, limit = values["weight"], values["limit"]
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise SettingError(
            f"{where}.weight",
            f"{weight!r} is not how often a row is used per epoch",
            do="Use a positive number; 1 uses every row once. Leave out a source that is not wanted",
        )
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise SettingError(f"{where}.limit", f"{limit!r} is not a number of rows", do="Use 1 or more, or null for all")
    for name, allowed in (("format", FORMATS), ("kind", tuple(KINDS))):
        if values[name] is not None and values[name] not in allowed:
            raise SettingError(
                f"{where}.{name}", f"{values[name]!r} is unknown", do=f"Use one of {list(allowed)}, or null"
            )
    ignore = values["ignore"]
    if isinstance(ignore, str) or not all(isinstance(column, str) for column in ignore or ()):
        raise SettingError(f"{where}.ignore", f"{ignore!r} is no list of column names", do="Write it as [name, name]")
    is_hub = values["path"].startswith(HUB_PREFIX)
    for name in ("split", "subset", "revision"):
        if values[name] is not None and not isinstance(values[name], str):
            raise SettingError(f"{where}.{name}", f"{values[name]!r} is not text", do="Put it in quotes")
        if values[name] is not None and name != "split" and not is_hub:
            raise SettingError(
                f"{where}.{name}", f"applies to hub data sets ({HUB_PREFIX}owner/name) only", do="Remove it"
            )
    if is_hub and values["format"] is not None:
        raise SettingError(f"{where}.format", "does not apply to a hub data set", do="Remove it")


class Draw:
    """How often each row of a source is used, row by row: a pure function of the seed and the source's place."""

    def __init__(self, weight: float, *, seed: int, place: int) -> None:
        self._whole, self._part = int(weight), weight - int(weight)
        name = f"{seed}/rows/{place}".encode()
        self._rng = np.random.default_rng(int.from_bytes(hashlib.sha256(name).digest()[:16], "little"))

    def next(self) -> int:
        """Copies of the next row; 0 leaves it out."""
        return self._whole + int(self._part > 0 and self._rng.random() < self._part)
