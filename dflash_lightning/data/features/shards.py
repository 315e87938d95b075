"""Target features on a disk: shards that ranks write at the same time and that are checked before they are trusted."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from dflash_lightning.data.features.cache import (
    FeatureCache,
    FixedRow,
    Storage,
    compute_features,
    fixed_rows,
    size_text,
)
from dflash_lightning.data.features.served import ServedFeatures
from dflash_lightning.data.read.store import DocumentStore
from dflash_lightning.errors import SettingError
from dflash_lightning.files import cache_folder, write_atomic
from dflash_lightning.progress import Progress
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import FeatureSpec, TargetFeatures

SHARD_BYTES = 256 * 2**20  # what a kill can lose, and what is held in memory while it is made
_FORMAT = 1  # raise it when what a shard holds changes its meaning
_KEY_FILE = "key.json"
_VOLATILE = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")


@dataclass(frozen=True)
class Shard:
    """Neighbouring fixed rows that share one file; ``start`` is the position of the first one in the whole data."""

    path: Path
    rows: tuple[FixedRow, ...]
    start: int
    tokens: int

    def about(self, key: str) -> dict[str, str]:
        """What the file must say of itself, besides its checksum."""
        return {"key": key, "first": str(self.rows[0][0]), "last": str(self.rows[-1][1])}


class FeatureShards:
    """The cache of one data set, target and spec: a folder of safetensors files, whole or not there at all.

    ``build`` makes what is missing or broken, ``open`` gives the features. A shard is written under another name and
    renamed, and always holds the same, so processes that make the same one at once, or a kill at any moment, do no
    harm: the next call goes on from the shards that stand. Everything the features depend on is the folder's key, and
    every file names it, so other data, layers or weights mean another folder and never a wrong feature.
    """

    def __init__(
        self,
        store: DocumentStore,
        target: FrozenTarget,
        spec: FeatureSpec,
        *,
        row_tokens: int | None,
        dtype: torch.dtype,
        root: str | Path | None = None,
        shard_bytes: int = SHARD_BYTES,
        served: ServedFeatures | None = None,
    ) -> None:
        """``root`` holds a folder per key; null is the user's cache folder. ``served`` null: the target computes."""
        self.store, self.target, self.storage = store, target, Storage.of(target, spec, dtype)
        self._read = None if served is None else served.read
        self.key = feature_key(store, target, spec, row_tokens=row_tokens, dtype=dtype)
        if served is not None:  # what computes there is not known as well as the target here
            own = dict.fromkeys(("target", "attention", "transformers", "computed_in"), "")
            self.key = {**self.key, **own, "served": served.key()}
        self.digest = _sha256(json.dumps(self.key, sort_keys=True).encode())
        self.folder = (cache_folder("features") if root is None else Path(root).expanduser()) / self.digest[:16]
        self.shards = list(self._plan(fixed_rows(store, row_tokens), shard_bytes))
        self._trusted: set[Path] = set()

    def _plan(self, rows: list[FixedRow], shard_bytes: int) -> Iterator[Shard]:
        """Shards of at least ``shard_bytes`` (the last may be smaller); they depend on the documents only."""
        offsets, first = self.store.offsets, 0
        for stop in range(1, len(rows) + 1):
            start, end = int(offsets[rows[first][0]]), int(offsets[rows[stop - 1][1]])
            if self.storage.bytes(end - start) >= shard_bytes or stop == len(rows):
                path = self.folder / f"features-{rows[first][0]:08d}.safetensors"
                yield Shard(path, tuple(rows[first:stop]), start, end - start)
                first = stop

    # -- room ---------------------------------------------------------------------------------------------------------

    def estimate(self) -> str:
        """What the cache takes and where, in a line, to be printed before anything is computed."""
        total, missing = self.storage.bytes(int(self.store.offsets[-1])), self._missing_bytes()
        dtype = str(self.storage.dtype).removeprefix("torch.")
        return (
            f"data: features of {self.store.offsets[-1]} tokens take {size_text(total)} of disk as "
            f"{dtype} in {self.folder} ({size_text(total - missing)} are there)"
        )

    def check_room(self) -> None:
        """Refuse a cache for which the disk has not enough room, before a single feature is computed."""
        missing = self._missing_bytes()
        place = next(folder for folder in [self.folder, *self.folder.resolve().parents] if folder.exists())
        free = shutil.disk_usage(place).free
        if missing > free:
            others = sorted(path.name for path in self.folder.parent.glob("*") if path != self.folder)
            raise SettingError(
                "data.cache_features",
                f"'disk' needs {size_text(missing)} more in {self.folder}, but {size_text(free)} are free there",
                do=f"Free some space (caches of other data or settings in {self.folder.parent}: "
                f"{others or 'none'}), name another disk in data.features_folder, use a smaller "
                "data.cache_dtype or fewer rows (data.limit), or null (features are computed on the fly)",
            )

    def _missing_bytes(self) -> int:
        return sum(self.storage.bytes(shard.tokens) for shard in self.shards if not shard.path.exists())

    # -- making -------------------------------------------------------------------------------------------------------

    def build(self, *, rank: int = 0, world: int = 1, progress: bool = False) -> None:
        """Make every ``world``-th shard that is not there, and every one of these whose content cannot be trusted.

        Reads its share once (about a second per gigabyte), so a fault of the disk shows here and not as a bad drafter.
        A second call leaves alone what the first has checked.
        """
        mine = [shard for shard in self.shards[rank::world] if shard.path not in self._trusted]
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / _KEY_FILE).exists():
            write_atomic(
                self.folder / _KEY_FILE, json.dumps({"target_name": self.target.facts.name, **self.key}, indent=2)
            )
        missing = [shard for shard in mine if not self._can_be_used(shard)]
        total = sum(shard.tokens for shard in missing)
        with Progress("target features", total, unit="tokens", shown=progress) as bar:
            for shard in missing:
                self._make(shard, bar.update)
        self._trusted |= {shard.path for shard in mine}

    def _can_be_used(self, shard: Shard) -> bool:
        fault = self._fault(shard)
        if fault is not None and shard.path.exists():
            warnings.warn(f"{shard.path}: {fault}; it is computed again", stacklevel=3)
        return fault is None

    def build_missing(self, *, rank: int, world: int) -> None:
        """Make every ``world``-th of the shards that are still not there: those of ranks that write to another disk."""
        self._trusted |= {shard.path for shard in self.shards if shard.path.exists()}
        self.build(rank=rank, world=world)

    def _make(self, shard: Shard, advance: Callable[[int], Any]) -> None:
        room = self.storage.room(1, shard.tokens)
        compute_features(self.store, self.target, shard.rows, room, advance=advance, read=self._read)
        tensors = {name: value[0] for name, value in room.tensors().items()}
        content = save(tensors, metadata={**shard.about(self.digest), "checksum": _checksum(tensors)})
        try:
            write_atomic(shard.path, content)
        except FileNotFoundError:  # another process made it too and has tidied up
            if not shard.path.exists():
                raise

    # -- reading ------------------------------------------------------------------------------------------------------

    def open(self) -> DiskFeatures:
        """The features, mapped into memory and read from the disk when they are needed.

        Raises:
            ValueError: a shard is missing or cut off, although all ranks have built theirs.
        """
        tensors = []
        for shard in self.shards:
            fault = self._fault(shard, content=False)
            if fault is not None:
                raise SettingError(
                    "data.cache_features",
                    f"{shard.path} cannot be used ({fault}), although it was made",
                    do="Was it removed while the run began? Start the run again: what is missing is made",
                )
            tensors.append(_load(shard.path)[1])
        for left in self.folder.glob(".*.tmp"):  # by kills; nobody needs them once all shards stand
            left.unlink(missing_ok=True)
        return DiskFeatures(self.store, self.storage, self.shards, tensors)

    def _fault(self, shard: Shard, *, content: bool = True) -> str | None:
        """Why the file of a shard cannot be used; null if it can. ``content`` compares its checksum too."""
        if not shard.path.exists():
            return "it is missing"
        try:
            about, tensors = _load(shard.path)
        except SafetensorError as error:
            return f"it is cut off or damaged ({error})"
        if {name: about.get(name) for name in ("key", "first", "last")} != shard.about(self.digest):
            return "it was made for other data or settings"
        if content and about.get("checksum") != _checksum(tensors):
            return "its content has changed since it was written (checksum)"
        return None


class DiskFeatures(FeatureCache):
    """Features in the shards of a folder, mapped into memory: the operating system keeps what it has room for."""

    def __init__(
        self, store: DocumentStore, storage: Storage, shards: list[Shard], tensors: list[dict[str, torch.Tensor]]
    ) -> None:
        super().__init__(store, storage)
        self._shards = shards
        self._features = [
            TargetFeatures(
                self.spec.layer_ids, kv_ids=self.spec.kv_ids, **{name: value[None] for name, value in of_shard.items()}
            )
            for of_shard in tensors
        ]
        self._first = [shard.rows[0][0] for shard in shards]

    def document(self, number: int) -> TargetFeatures:
        place = bisect_right(self._first, number) - 1
        start, end = (self.store.offsets[number : number + 2] - self._shards[place].start).tolist()
        return self._features[place].rows(start, end)


def feature_key(
    store: DocumentStore, target: FrozenTarget, spec: FeatureSpec, *, row_tokens: int | None, dtype: torch.dtype
) -> dict[str, Any]:
    """Everything that features depend on, beyond the last bits (which device computed them).

    ``target`` covers the weights (see ``TargetFacts.digest``), ``config`` what the model makes of them (positions,
    windows, caps), ``documents`` all ids and where documents begin, ``row_tokens`` which of them went through together.
    ``last_hidden_in`` is stated where there are such states: an earlier format rounded them to ``stored_in``.
    """
    config = {name: value for name, value in target.model.config.to_dict().items() if name not in _VOLATILE}
    return {
        "format": _FORMAT,
        "target": target.facts.digest,
        "config": _sha256(json.dumps(config, sort_keys=True, default=str).encode()),
        "attention": target.model.config._attn_implementation,
        "transformers": transformers.__version__,
        "computed_in": " by products in ".join(map(str, dict.fromkeys((target.dtype, target.products)))),
        "stored_in": str(dtype),
        "layer_ids": list(spec.layer_ids),
        "last_hidden": spec.last_hidden,
        **({"kv_ids": list(spec.kv_ids)} if spec.kv_ids else {}),
        **({"last_hidden_in": str(target.dtype)} if spec.last_hidden else {}),
        "documents": _sha256(store.offsets.tobytes(), store.ids.tobytes()),
        "row_tokens": row_tokens,
    }


def _load(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Metadata and tensors of a file, the latter mapped: nothing is read before it is used."""
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _checksum(tensors: dict[str, torch.Tensor]) -> str:
    """CRC-32 over all bytes: against faults of disks and copies, not against malice."""
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, value)
    return f"{value:08x}"


def _sha256(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
