"""Trades time for memory: what the backward pass needs of a draft layer is made a second time instead of kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.checkpoint import checkpoint

from dflash_lightning.drafter import Drafter
from dflash_lightning.errors import SettingError
from dflash_lightning.module import DraftModule


class ActivationCheckpointing(Callback):
    """Keeps only the inputs of draft layers in training steps; a step then makes each layer's forward pass twice.

    Gradients are the same. Drafters whose layers do not run one after another over whole blocks (``Drafter.units``
    names none) are refused.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, DraftModule)
        checkpoint_layers(pl_module.draft_model.drafter)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and isinstance(pl_module, DraftModule) and pl_module.model is not None:
            keep_layers(pl_module.draft_model.drafter)


def checkpoints(trainer: Trainer) -> bool:
    """Whether a run of ``trainer`` keeps the inputs of layers alone."""
    return any(isinstance(callback, ActivationCheckpointing) for callback in trainer.callbacks)  # type: ignore[attr-defined]


@contextmanager
def checkpointed_layers(drafter: Drafter, yes: bool = True) -> Iterator[None]:
    """``checkpoint_layers`` for the body, if ``yes``."""
    if yes:
        checkpoint_layers(drafter)
    try:
        yield
    finally:
        if yes:
            keep_layers(drafter)


def checkpoint_layers(drafter: Drafter) -> None:
    """From now on, wherever gradients are recorded, the layers of ``drafter`` keep only their inputs."""
    units = drafter.units()
    if not units:
        raise SettingError(
            "callbacks.activation_checkpointing",
            f"{type(drafter).__name__} has no layers that run one after another",
            do="Leave the callback out",
        )
    for unit in units:
        vars(unit)["forward"] = _Checkpointed(unit)


def keep_layers(drafter: Drafter) -> None:
    """Undo ``checkpoint_layers``."""
    for unit in drafter.units():
        vars(unit).pop("forward", None)


class _Checkpointed:
    """``forward`` of a layer, found anew at every call: a strategy may change the layer's class after this is made."""

    def __init__(self, unit: nn.Module) -> None:
        self.unit = unit

    def __call__(self, *inputs: Any) -> Any:
        forward = type(self.unit).forward
        if not torch.is_grad_enabled():
            return forward(self.unit, *inputs)
        # No layer draws random numbers, so their state need not be restored.
        return checkpoint(forward, self.unit, *inputs, use_reentrant=False, preserve_rng_state=False)
