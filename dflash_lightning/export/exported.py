"""An exported folder as it stands on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_lightning.export.base import Exporter
from dflash_lightning.export.formats import FORMATS
from dflash_lightning.export.replay import Replay
from dflash_lightning.files import CONFIG_FILE, REPLAY_FILE
from dflash_lightning.model.files import WEIGHTS_FILE, read_object
from dflash_lightning.model.stated import check_kinds


@dataclass(frozen=True)
class Exported:
    """A folder as it stands on disk."""

    folder: Path
    raw: dict[str, Any]
    tensors: dict[str, Tensor]
    replay: Replay

    @property
    def exporter(self) -> Exporter:
        """The format that wrote the folder."""
        return FORMATS[self.replay.format]

    @classmethod
    def open(cls, folder: Path) -> Exported:
        """Read an exported folder.

        Raises:
            ValueError: it is none, or a file of it cannot be read.
        """
        raw, replay = (_read_json(folder, name) for name in (CONFIG_FILE, REPLAY_FILE))
        check_kinds(raw, str(folder))
        found = Replay.from_json(replay)
        if found.format not in FORMATS:
            raise ValueError(f"{folder}: {REPLAY_FILE} is of format {found.format!r}, known are {list(FORMATS)}.")
        return cls(folder, raw, read_tensors(folder), found)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder, as they are stored."""
    file = folder / WEIGHTS_FILE
    try:
        with safe_open(file, framework="pt") as stored:
            return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read ({error}). Export again.") from error


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    file = folder / name
    if not file.is_file():
        raise ValueError(f"{folder}: there is no {name}. Give a folder that `dflash export` wrote.")
    return read_object(file, "Export again.")
