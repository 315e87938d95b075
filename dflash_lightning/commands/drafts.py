"""Finds the drafter and the target that ``--draft`` and ``--target`` mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from dflash_lightning.files import RECIPE_FILE
from dflash_lightning.model import DraftModel
from dflash_lightning.model_found import find_weights
from dflash_lightning.recipe import load_recipe, make_target
from dflash_lightning.run import read_recipe
from dflash_lightning.target import FrozenTarget

_DEVICES = "Use cpu, or cuda where there is a GPU (cuda:1 is the second)."


@dataclass(frozen=True)
class FoundDraft:
    """A drafter, where it was read, and the recipe of its run (empty for an exported folder).

    ``measured`` is what the run's own evaluation found of these weights; see ``FoundWeights``.
    """

    model: DraftModel
    source: Path
    recipe: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)

    @property
    def chat_template_kwargs(self) -> dict[str, Any]:
        """What the drafter's training rows were rendered with; prompts must be rendered alike."""
        if not self.recipe:  # an exported folder says so itself
            return self.model.config.chat_template_kwargs
        return self.recipe.get("data", {}).get("chat_template_kwargs") or {}


def find_draft(path: str) -> FoundDraft:
    """The drafter at a run folder (its best checkpoint, else the last), a checkpoint file or an exported folder.

    Raises:
        ValueError: there is none; says what was looked for.
    """
    found = find_weights(path, setting="--draft")
    return FoundDraft(found.model, found.source, _recipe_above(found.source), found.measured)


def _recipe_above(checkpoint: Path) -> dict[str, Any]:
    folder = run_of(checkpoint)
    return {} if folder is None else read_recipe(folder / RECIPE_FILE)


def run_of(checkpoint: Path) -> Path | None:
    """The run's folder that a checkpoint lies in; null for one that was copied away, and for a folder."""
    if not checkpoint.is_file():
        return None
    return next((folder for folder in checkpoint.resolve().parents[:2] if (folder / RECIPE_FILE).exists()), None)


def check_device(name: str | None) -> None:
    """Refuse a device that cannot hold weights, before any are read; null is the one that is there.

    Raises:
        ValueError: torch does not know it, or it is not usable on this machine.
    """
    if name is None:
        return
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        reason = str(error).partition("\n")[0][:120]
        raise ValueError(f"--device: {name} cannot be used here ({reason}). {_DEVICES}") from error
    if device.type == "meta":
        raise ValueError(f"--device: {name} holds no values. {_DEVICES}")


def open_target(name: str, *, device: str | None, dtype: str | None) -> FrozenTarget:
    """The target that ``--target`` names: a target option, a path, a hub id or a GGUF file."""
    node = OmegaConf.to_container(load_recipe("dflash", [f"target={name}"]).target, resolve=True)
    return _open(node, device, dtype)


def open_target_of(draft: FoundDraft, name: str | None, *, device: str | None, dtype: str | None) -> FrozenTarget:
    """The target to decode with: ``name``, else the one of the drafter's run, else the one its config names.

    Raises:
        ValueError: the drafter was made for another target, or names none.
    """
    if name is not None:
        target = open_target(name, device=device, dtype=dtype)
    elif "target" in draft.recipe:
        target = _open(draft.recipe["target"], device, dtype)
    elif draft.model.config.target.get("name"):
        target = open_target(draft.model.config.target["name"], device=device, dtype=dtype)
    else:
        raise ValueError(f"--target: {draft.source} does not say which target it was made for. Give --target.")
    target.check_draft(draft.model.config)
    draft.model.to(target.device)  # type: ignore[arg-type]
    return target


def _open(node: Any, device: str | None, dtype: str | None) -> FrozenTarget:
    """``device`` null means CUDA where there is one; a ``device_map`` of the recipe stays in force."""
    check_device(device)
    settings = dict(node)
    if dtype is not None:
        settings["dtype"] = dtype
    if device is not None or settings.get("device_map") is None:
        settings["device"] = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return make_target(settings)
