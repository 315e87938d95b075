"""The drafter behind a path: a run folder, a checkpoint file, an exported folder or a hub repository."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from dflash_lightning.draft_config import DraftConfig, check_contract
from dflash_lightning.errors import SettingError
from dflash_lightning.files import CONFIG_FILE, DRAFT_PLACES, find_draft_place
from dflash_lightning.model import DraftModel, load_draft
from dflash_lightning.model.files import planned_model, read_draft_config
from dflash_lightning.model.stated import check_kinds
from dflash_lightning.model.weights import check_tensors
from dflash_lightning.target.hub import hub_place

_PREFIX = "model."  # of the drafter's tensors in a checkpoint


@dataclass(frozen=True)
class FoundWeights:
    """A drafter in eval mode and fp32, and where it was read.

    ``measured`` is what the run's own evaluation found of these very weights (``decode/tau`` and the like), as far as
    the checkpoint says, and its ``step``; empty for a folder.
    """

    model: DraftModel
    source: Path
    measured: dict[str, float] = field(default_factory=dict)


def find_weights(path: str | Path, *, setting: str) -> FoundWeights:
    """The drafter at ``path``; of a run folder its best checkpoint, else the last one.

    Raises:
        ValueError: there is none, or it is damaged; ``setting`` says where the path was written.
    """
    place = find_draft_place(path, setting=setting)
    if place is None:
        return _from_hub(str(path), setting)
    if place.is_file():
        return read_checkpoint(place, setting=setting)
    with _blamed(setting):
        return FoundWeights(_load(place), place)


@contextmanager
def _blamed(setting: str) -> Iterator[None]:
    """Say of an error in a folder which key of a recipe names the folder; options of commands say so by themselves."""
    try:
        yield
    except ValueError as error:
        if setting.startswith("--"):
            raise
        what, _, do = str(error).partition(". ")
        raise SettingError(setting, what, do=do) from error


def _load(folder: Path) -> DraftModel:
    """Read on the CPU, also while Lightning builds modules elsewhere: transformers takes that as a device map."""
    with torch.device("cpu"):
        return load_draft(folder)


def _from_hub(path: str, setting: str) -> FoundWeights:
    place = hub_place(path, CONFIG_FILE, setting=setting)
    if place == path:
        print(f"{setting}: there is no {path} here; looking for it on the hub ...", file=sys.stderr, flush=True)
    try:
        return FoundWeights(_load(Path(place)), Path(path))
    except OSError as error:
        reason = str(error).splitlines()[0][:160]
        raise ValueError(
            f"{setting}: there is no {path} here, nor could it be read as a hub repository ({reason}). {DRAFT_PLACES}"
        ) from error


def read_checkpoint(file: Path, *, setting: str) -> FoundWeights:
    """The drafter in a checkpoint of ``dflash fit``.

    Raises:
        ValueError: the file is none, or its tensors are not those of a drafter that can be used.
    """
    checkpoint = _read(file, setting)
    state = {k.removeprefix(_PREFIX): v for k, v in checkpoint["state_dict"].items() if k.startswith(_PREFIX)}
    check_tensors(state, f"{setting}: {file}")
    config = _config_of(checkpoint, f"{setting}: {file}")
    planned_model(DraftModel, config, f"{setting}: {file}")
    with torch.device("cpu"):
        model = DraftModel(config)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:  # lists the tensors that are missing, unknown or of another shape
        raise ValueError(f"{setting}: the tensors in {file} are not its drafter's. {DRAFT_PLACES}\n{error}") from error
    return FoundWeights(model.eval(), file, _measured(checkpoint))


def find_draft_config(path: str | Path, *, setting: str) -> DraftConfig | None:
    """The configuration of the drafter at ``path`` (see ``find_weights``), without its weights; null for the hub's.

    Raises:
        ValueError: there is none, or it is damaged; ``setting`` says where the path was written.
    """
    place = find_draft_place(path, setting=setting)
    if place is None:
        return None
    if place.is_dir():
        with _blamed(setting):
            return read_draft_config(place)
    return _config_of(_read(place, setting, mmap=True), f"{setting}: {place}")


def _config_of(checkpoint: dict[str, Any], where: str) -> DraftConfig:
    try:
        config: DraftConfig = DraftConfig.from_dict(checkpoint["draft_config"])
    except StrictDataclassError as error:
        raise ValueError(f"{where}: its draft_config contradicts itself ({error.__cause__}). {DRAFT_PLACES}") from error
    return config


def read_history(file: Path) -> list[dict[str, float]]:
    """What a run's evaluations had found when it wrote this checkpoint, each with its ``step``; empty without any.

    Raises:
        ValueError: the file is damaged, or no checkpoint of a drafter.
    """
    return _history(_read(file, "checkpoint", mmap=True))


def _read(file: Path, setting: str, *, mmap: bool = False) -> dict[str, Any]:
    """A checkpoint's content; with ``mmap`` its tensors stay on disk until they are used."""
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).partition("\n")[0][:120] or "it is empty"
        raise ValueError(f"{setting}: {file} cannot be read as a checkpoint ({reason}). {DRAFT_PLACES}") from error
    if not isinstance(checkpoint, dict) or "draft_config" not in checkpoint:
        held = f"only {list(checkpoint)[:8]}" if isinstance(checkpoint, dict) else f"it holds a {type(checkpoint)}"
        raise ValueError(f"{setting}: {file} is no checkpoint of a drafter (no draft_config, {held}).")
    for name in ("draft_config", "state_dict"):
        if not isinstance(checkpoint.get(name), dict):
            raise ValueError(f"{setting}: {file} is damaged: its {name} is absent or no mapping. {DRAFT_PLACES}")
    check_contract(checkpoint["draft_config"], f"{setting}: {file}")
    check_kinds(checkpoint["draft_config"], f"{setting}: {file}")
    return checkpoint


def _measured(checkpoint: dict[str, Any]) -> dict[str, float]:
    """The entry of the evaluation's history that was made of the weights in this checkpoint."""
    step = checkpoint.get("global_step")
    if step is None:
        return {}
    for entry in reversed(_history(checkpoint)):
        if entry["step"] == step:
            return entry
    return {"step": float(step)}  # the last checkpoint is written before it is measured


def _history(checkpoint: dict[str, Any]) -> list[dict[str, float]]:
    """What callbacks remember to have measured, by step; figures of one step are one entry."""
    found: dict[float, dict[str, float]] = {}
    for state in (checkpoint.get("callbacks") or {}).values():
        entries = state.get("history") if isinstance(state, dict) else None
        for entry in entries or []:
            if "step" in entry:
                found.setdefault(entry["step"], {}).update((str(name), float(value)) for name, value in entry.items())
    return [found[step] for step in sorted(found)]
