"""Blocks that change their size in a run: the block constructor, the drafter and its checkpoints stay of one size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dflash_lightning.block import BlockConstructor
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.errors import SettingError
from dflash_lightning.model import DraftModel

_VOLATILE = {"transformers_version", "_name_or_path"}


def resize(block: BlockConstructor, model: DraftModel, block_size: int) -> bool:
    """Make blocks and drafter one of ``block_size`` slots; false, and nothing is changed, where blocks cannot be."""
    if block_size == model.config.block_size:
        return True
    if not block.resize(block_size):
        return False
    model.config.block_size = block_size
    return True


def follow_checkpoint(block: BlockConstructor, model: DraftModel, saved: Mapping[str, Any]) -> None:
    """Take over the size that blocks had grown to; ``saved`` is the drafter's configuration in a checkpoint.

    Raises:
        ValueError: in anything else it is another drafter than ``model``.
    """
    resize(block, model, saved.get("block_size", model.config.block_size))
    # By way of the class, which fills in what a checkpoint of an older version does not state.
    theirs, ours = (c.to_dict() for c in (DraftConfig.from_dict(dict(saved)), model.config))
    differing = sorted(k for k in {*theirs, *ours} if theirs.get(k) != ours.get(k) and k not in _VOLATILE)
    if differing:
        lines = "; ".join(f"{k}: checkpoint {theirs.get(k)!r}, now {ours.get(k)!r}" for k in differing)
        raise ValueError(
            f"The checkpoint's drafter is not the one this recipe builds ({lines}). "
            "Resume with the recipe and data it was trained with, or start anew with --fresh."
        )


def check_growth(block: BlockConstructor, model: DraftModel) -> None:
    """Refuse a drafter that has weights for the slots of one block size.

    Raises:
        ValueError: names the weights.
    """
    grown = DraftConfig.from_dict({**model.config.to_dict(), "block_size": block.largest_size})
    with torch.device("meta"):
        larger = {name: tensor.shape for name, tensor in DraftModel(grown).state_dict().items()}
    own = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if differing := sorted(name for name in own.keys() | larger.keys() if own.get(name) != larger.get(name)):
        raise SettingError(
            "block",
            f"blocks grow to {block.largest_size} slots, but the drafter has weights for the slots of "
            f"{model.config.block_size}: {', '.join(differing[:4])}",
            "Use block=anchored, or a drafter and head without weights of a slot",
        )
