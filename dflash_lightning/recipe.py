"""A recipe: load -> check -> build. The one place where settings become objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from omegaconf import DictConfig, OmegaConf

from dflash_lightning.module import DraftModule
from dflash_lightning.recipe_check import Suggested, data_files, list_faults
from dflash_lightning.recipe_faults import Fault, RecipeError
from dflash_lightning.recipe_load import load_recipe, recipe_text
from dflash_lightning.recipe_make import make
from dflash_lightning.recipe_precision import settle_precision
from dflash_lightning.target import FrozenTarget

__all__ = [
    "Fault",
    "Parts",
    "RecipeError",
    "Suggested",
    "build_recipe",
    "check_recipe",
    "data_files",
    "list_faults",
    "load_recipe",
    "make_target",
    "recipe_text",
]


@dataclass(frozen=True)
class Parts:
    """What a recipe builds. ``trainer.fit(module, data)`` is the run."""

    target: FrozenTarget
    module: DraftModule
    data: LightningDataModule
    trainer: Trainer


def check_recipe(cfg: DictConfig) -> None:
    """Refuse a recipe that cannot run; takes seconds, loads no weights.

    Raises:
        RecipeError: every fault at once: unknown keys, wrong types, open values, class paths that do not import, files
            that are not there, settings that would be ignored.
    """
    faults = list_faults(cfg)
    if faults:
        raise RecipeError(faults, f"recipe {cfg.get('name', '')!r}")


def build_recipe(cfg: DictConfig) -> Parts:
    """Check, seed, then build: the target once (it is large), handed to module and data; callbacks into the trainer.

    The trainer comes first, so that settings it refuses are known before weights are loaded. The drafter's weights are
    made last, in ``DraftModule.configure_model``.

    Raises:
        RecipeError: see ``check_recipe``; or Lightning refuses the trainer's settings on this machine.
    """
    check_recipe(cfg)
    tree: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    seed_everything(tree["seed"], workers=True, verbose=False)
    trainer = _make_trainer(tree)
    target = make_target(tree["target"])
    groups = ("block", "conditioning", "drafter", "head", "loss", "optim")
    plain = ("draft_vocabulary", "init_from", "seed")
    module = DraftModule(target, **{key: make(tree[key]) for key in groups}, **{key: tree[key] for key in plain})
    data = make(tree["data"], target=target)
    return Parts(target=target, module=module, data=data, trainer=trainer)


def _make_trainer(tree: dict[str, Any]) -> Trainer:
    callbacks = list(make(tree["callbacks"]).values())
    try:
        return make(settle_precision(tree["trainer"]), callbacks=callbacks)
    # TypeError: devices that are none; ModuleNotFoundError: a logger whose package is not installed
    except (MisconfigurationException, ValueError, TypeError, ModuleNotFoundError) as error:
        do = "See the trainer options (dflash recipes), or set the trainer's arguments one by one"
        raise RecipeError([Fault("trainer", str(error).rstrip("."), do)], f"recipe {tree['name']!r}") from error


def make_target(node: dict[str, Any]) -> FrozenTarget:
    """The frozen target that a recipe's ``target`` node describes; what it suggests to recipes is not its business."""
    return make({key: value for key, value in node.items() if key != "suggested"})
