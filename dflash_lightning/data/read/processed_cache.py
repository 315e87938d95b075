"""Processed documents on disk, under a key of everything they depend on: nothing stale is ever read.

An entry is a folder with three arrays, which are mapped and not loaded, and ``entry.json``, which is written last and
holds the key in full, the account of the rows and a digest of every other file.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dflash_lightning.data.read.store import DocumentStore
from dflash_lightning.data.read.summary import DataSummary
from dflash_lightning.errors import SettingError
from dflash_lightning.files import cache_folder, file_digest

USER = "user"  # the setting that means this user's own cache folder
_ARRAYS = ("offsets", "ids", "mask")
_ENTRY = "entry.json"
_POLL_SECONDS = 0.2
_WAIT_SECONDS = 24 * 3600  # for another process that makes the same entry; its lock goes when it dies


@dataclass(frozen=True)
class Processed:
    """Documents, the account of their rows, and an entry (file, line, reason) per dropped row."""

    store: DocumentStore
    summary: DataSummary
    rejected: list[dict[str, Any]] = field(default_factory=list)


class ProcessedCache:
    """A folder of processed data sets; safe to share by any number of processes, users' runs and machines.

    Args:
        folder: where entries are kept; ``"user"`` is ``~/.cache/dflash_lightning/data``. Entries are never removed: the
            folder may be deleted at any time.
    """

    def __init__(self, folder: str) -> None:
        self.folder = cache_folder("data") if folder == USER else Path(folder).expanduser()

    def entry(self, key: dict[str, Any]) -> Path:
        """The folder of what ``key`` describes, whether it is there or not."""
        return self.folder / _digest(key)[:32]

    def get(self, key: dict[str, Any], make: Callable[[], Processed]) -> tuple[Processed, bool]:
        """What ``make`` gives, and whether it came from the cache: there, whole, and of this very key.

        Only one process at a time makes an entry; others that want it wait. A damaged entry is made anew.

        Raises:
            ValueError: the folder cannot be written.
        """
        entry = self.entry(key)
        found = _load(entry, key)
        if found is not None:
            return found, True
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = entry.with_name(f"{entry.name}.lock").open("w")
        except OSError as error:
            raise self._unwritable(error) from error
        with lock:
            _wait_for(lock)
            found = _load(entry, key)  # another process may have made it meanwhile
            if found is not None:
                return found, True
            made = make()
            try:
                _save(entry, key, made)
            except OSError as error:
                raise self._unwritable(error) from error
            saved = _load(entry, key)
        assert saved is not None, f"{entry} was written and cannot be read"
        return saved, False  # mapped from the files, so that what was made can be forgotten

    def _unwritable(self, error: OSError) -> ValueError:
        return ValueError(
            f"data.cache: {self.folder} cannot be written ({error}). Name a folder with room, or set data.cache=null "
            "(every process then reads the files by itself)."
        )


def _wait_for(lock: io.TextIOWrapper) -> None:
    """Take the lock; the system gives it back when the file is closed or the process ends, however it ends.

    Lock files stay: removing one that another process has just opened would let two processes in.
    """
    start = time.monotonic()
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() - start > _WAIT_SECONDS:
                hours = _WAIT_SECONDS // 3600
                raise SettingError(
                    "data.cache",
                    f"another process has been making {lock.name} for {hours} hours",
                    do="Look what it does, or set data.cache=null",
                ) from None
            time.sleep(_POLL_SECONDS)


def _save(entry: Path, key: dict[str, Any], made: Processed) -> None:
    """Write a whole entry or none: into a folder of its own, which is renamed at the end."""
    prefix = f"{entry.name}.{platform.node()}."
    for left_over in entry.parent.glob(f"{prefix}*.tmp"):  # of a process of this machine that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=prefix, suffix=".tmp", dir=entry.parent))
    try:
        for name in _ARRAYS:
            with (scratch / f"{name}.npy").open("wb") as file:
                np.save(file, getattr(made.store, name), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        digests = {path.name: file_digest(path) for path in sorted(scratch.iterdir())}
        tree = {"key": key, "files": digests, "summary": made.summary.to_dict(), "rejected": made.rejected}
        (scratch / _ENTRY).write_text(json.dumps({**tree, "check": _digest(tree)}), encoding="utf-8")
        shutil.rmtree(entry, ignore_errors=True)  # damaged, or _load would have taken it
        try:
            scratch.replace(entry)
        except OSError:  # where machines share the folder but not its locks, another one may have been faster
            if _load(entry, key) is None:
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _load(entry: Path, key: dict[str, Any]) -> Processed | None:
    """What an entry holds; null where there is none, or one that is not whole or not of this key."""
    try:
        tree = json.loads((entry / _ENTRY).read_text(encoding="utf-8"))
        if tree.pop("check") != _digest(tree) or _digest(tree["key"]) != _digest(key):
            return None
        if any(file_digest(entry / name) != digest for name, digest in tree["files"].items()):
            return None
        # Copy on write: torch warns of arrays that it could not write to, and nobody writes to these.
        arrays = {name: np.load(entry / f"{name}.npy", mmap_mode="c", allow_pickle=False) for name in _ARRAYS}
        return Processed(DocumentStore(**arrays), DataSummary.from_dict(tree["summary"]), tree["rejected"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # missing, half, or written by another version
        return None


def _digest(tree: Any) -> str:
    """sha256 of ``tree`` as a file gives it back: there keys are strings, and "128" stands before "64"."""
    read_back = json.loads(json.dumps(tree))
    return hashlib.sha256(json.dumps(read_back, sort_keys=True).encode()).hexdigest()
