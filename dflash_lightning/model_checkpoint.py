"""A drafter out of a training checkpoint."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.files import draft_place
from dflash_lightning.model import DraftModel, load_draft
from dflash_lightning.model_files import read_draft_config

_ANOTHER = "Give a .ckpt file that dflash fit wrote, a run folder or an exported folder."


def open_draft(path: str | Path, *, setting: str = "--draft") -> DraftModel:
    """The drafter at a run folder (its best checkpoint, else the last), a checkpoint file or an exported folder.

    Raises:
        ValueError: there is none, or it is damaged; says what was looked for.
    """
    place = draft_place(path, setting=setting)
    return load_draft(place) if place.is_dir() else read_checkpoint(place, setting=setting)


def open_draft_config(path: str | Path, *, setting: str = "--draft") -> DraftConfig:
    """The configuration of the drafter at ``path`` (see ``open_draft``), without its weights.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    place = draft_place(path, setting=setting)
    if place.is_dir():
        return read_draft_config(place)
    return DraftConfig.from_dict(_read(place, setting, mmap=True)["draft_config"])


def read_checkpoint(file: Path, *, setting: str = "--draft") -> DraftModel:
    """The drafter in a checkpoint that a run wrote, in eval mode on the CPU.

    Raises:
        ValueError: it is no such checkpoint, or damaged.
    """
    checkpoint = _read(file, setting, mmap=False)
    model = DraftModel(DraftConfig.from_dict(checkpoint["draft_config"]))
    prefix = "model."
    state = {k.removeprefix(prefix): v for k, v in checkpoint["state_dict"].items() if k.startswith(prefix)}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:  # lists the tensors that are missing, unknown or of another shape
        raise ValueError(f"{setting}: the tensors in {file} are not its drafter's. {_ANOTHER}\n{error}") from error
    return model.eval()


def _read(file: Path, setting: str, *, mmap: bool) -> dict[str, Any]:
    """A checkpoint's content; with ``mmap`` its tensors stay on disk until they are used."""
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).partition("\n")[0][:120] or "it is empty"
        raise ValueError(f"{setting}: {file} cannot be read as a checkpoint ({reason}). {_ANOTHER}") from error
    if not isinstance(checkpoint, dict) or "draft_config" not in checkpoint:
        held = f"only {list(checkpoint)[:8]}" if isinstance(checkpoint, dict) else f"it holds a {type(checkpoint)}"
        raise ValueError(f"{setting}: {file} is no checkpoint of a drafter (no draft_config, {held}). {_ANOTHER}")
    for name in ("draft_config", "state_dict"):
        if not isinstance(checkpoint.get(name), dict):
            raise ValueError(f"{setting}: {file} is damaged: its {name} is absent or no mapping. {_ANOTHER}")
    return checkpoint
