"""Finds the drafter and the target that ``--draft`` and ``--target`` mean."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from dflash_lightning.device import best_device
from dflash_lightning.files import RECIPE_FILE
from dflash_lightning.model import DraftModel
from dflash_lightning.model.found import find_weights
from dflash_lightning.recipe.load import load_recipe
from dflash_lightning.recipe.make import make_target
from dflash_lightning.run import read_recipe
from dflash_lightning.target import FrozenTarget, TargetText, load_text

_DEVICES = "Use cpu, or cuda where there is a GPU (cuda:1 is the second)."
_LOADED_BY = "dflash_lightning.target.load_target"


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
    return _open(_named_node(name), device, dtype)


def open_target_of(
    draft: FoundDraft, name: str | None, *, device: str | None, dtype: str | None, relative: bool = False
) -> FrozenTarget:
    """The target to decode with: ``name``, else the one of the drafter's run, else the one its config names.

    ``relative`` (``--other-target``) takes ``name`` although the drafter was made for another target, if it fits.

    Raises:
        ValueError: the drafter was made for another target, or names none.
    """
    if relative and name is None:
        raise ValueError("--other-target: it says that --target is not the drafter's own, so give --target too.")
    print(f"loading the target {name or named_target(draft)} ...", file=sys.stderr, flush=True)
    target = _open(_target_node(draft, name), device, dtype)
    use_draft(draft, target, relative=relative)
    return target


def use_draft(draft: FoundDraft, target: FrozenTarget, *, relative: bool = False) -> None:
    """Move the drafter to where the target is, if it was made for that.

    Raises:
        ValueError: it was made for another target.
    """
    try:
        target.check_draft(draft.model.config, relative=relative)
    except ValueError as error:  # of several drafters, it is open which one it speaks of
        raise ValueError(f"{draft.source}: {str(error).removeprefix('draft: ')}") from None
    draft.model.to(target.device)  # type: ignore[arg-type]


def other_target(draft: FoundDraft, target: FrozenTarget) -> dict[str, Any] | None:
    """Which target the drafter was made for and which it is measured on, where these are two; else null."""
    made_for = draft.model.config.target
    digest = made_for.get("digest")
    if digest is None or digest == target.facts.digest:
        return None
    return {
        "made_for": made_for.get("name"),
        "made_for_digest": digest,
        "measured_on": target.facts.name,
        "measured_on_digest": target.facts.digest,
    }


def other_target_line(other: dict[str, Any] | None) -> str:
    """``other_target`` in words; empty where the drafter is on its own target."""
    if other is None:
        return ""
    return (
        f"on another target than its own (--other-target): made for {other['made_for']} "
        f"({other['made_for_digest'][:12]}), used on {other['measured_on']} ({other['measured_on_digest'][:12]})"
    )


def open_text_of(draft: FoundDraft, name: str | None) -> TargetText | None:
    """Tokenizer and sizes of the target that ``open_target_of`` opens, in seconds: no weight is read.

    Null where only the target itself can tell: it is not loaded in the usual way.

    Raises:
        ValueError: the drafter names no target, or it cannot be read.
    """
    node = _target_node(draft, name)
    if node["_target_"] != _LOADED_BY:
        return None
    known = {key: node[key] for key in ("revision", "trust_remote_code") if key in node}
    return load_text(node["source"], **known)


def named_target(draft: FoundDraft) -> str:
    """What the drafter says its target is called."""
    return str(draft.recipe.get("target", {}).get("source") or draft.model.config.target.get("name") or "")


def _target_node(draft: FoundDraft, name: str | None) -> dict[str, Any]:
    """The ``target`` node of a recipe that says what to load."""
    if name is None and "target" in draft.recipe:
        return dict(draft.recipe["target"])
    name = name or draft.model.config.target.get("name")
    if not name:
        raise ValueError(f"--target: {draft.source} does not say which target it was made for. Give --target.")
    return _named_node(name)


def _named_node(name: str) -> dict[str, Any]:
    node = OmegaConf.to_container(load_recipe("dflash", [f"target={name}"]).target, resolve=True)
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}


def _open(node: Any, device: str | None, dtype: str | None) -> FrozenTarget:
    """``device`` null means CUDA where there is one; a ``device_map`` of the recipe stays in force."""
    check_device(device)
    settings = {key: value for key, value in node.items() if key != "tensor_parallel"}  # this is one process
    if dtype is not None:
        settings["dtype"] = dtype
    if device is not None or settings.get("device_map") is None:
        settings["device"] = device or best_device()
    return make_target(settings)
