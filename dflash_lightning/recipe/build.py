"""A recipe: load -> check -> build. The one place where settings become objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ProgressBar
from omegaconf import DictConfig, OmegaConf

from dflash_lightning.callbacks import TrainingBar
from dflash_lightning.module import DraftModule
from dflash_lightning.recipe.arguments import by_import
from dflash_lightning.recipe.check import find_faults
from dflash_lightning.recipe.drafting import PARTS, drafting_faults
from dflash_lightning.recipe.faults import Fault, RecipeError
from dflash_lightning.recipe.make import make, make_target
from dflash_lightning.recipe.precision import settle_precision
from dflash_lightning.recipe.served import loads_layers, without_faulty
from dflash_lightning.recipe.target import greet, part_faults, target_faults
from dflash_lightning.recipe.tree import plain_tree
from dflash_lightning.target import FrozenTarget


@dataclass(frozen=True)
class Parts:
    """What a recipe builds. ``trainer.fit(module, data)`` is the run."""

    target: FrozenTarget
    module: DraftModule
    data: LightningDataModule
    trainer: Trainer


def list_faults(cfg: DictConfig) -> list[Fault]:
    """Everything that is wrong with a recipe; imports the classes it names, loads no weights, writes nothing."""
    open_values: list[Fault] = []
    tree = plain_tree(cfg, open_values)
    faults = find_faults(tree, open_values, by_import)
    tree = without_faulty(tree, faults)
    wrong = {fault.where.partition(".")[0] for fault in faults}
    if not wrong & {"block", "conditioning", "drafter", "head", "loss", "init_from", "draft_vocabulary"}:
        faults += part_faults(tree)
        faults += [] if "target" in wrong else target_faults(tree)
    if not wrong & {*PARTS}:
        faults += drafting_faults(tree, wrong)
    return list(dict.fromkeys(faults))


def check_recipe(cfg: DictConfig) -> None:
    """Refuse a recipe that cannot run; takes seconds, loads no weights.

    Raises:
        RecipeError: every fault at once: unknown keys, wrong types, open values, class paths that do not import, files
            that are not there, settings that would be ignored, and what the target's configuration does not have.
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
        ValueError: a server that is to compute features cannot be used.
    """
    check_recipe(cfg)
    tree: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    seed_everything(tree["seed"], workers=True, verbose=False)
    trainer = _make_trainer(tree)
    if faults := list(target_faults(tree, local=False)):  # of a target on the hub, which the check does not ask
        raise RecipeError(faults, f"recipe {tree['name']!r}")
    greet(tree)
    target = make_target(tree["target"], layers=loads_layers(tree))
    groups = ("block", "conditioning", "drafter", "head", "loss", "optim")
    plain = ("draft_vocabulary", "init_from", "seed")
    module = DraftModule(target, **{key: make(tree[key]) for key in groups}, **{key: tree[key] for key in plain})
    data = make(tree["data"], target=target)
    return Parts(target=target, module=module, data=data, trainer=trainer)


def _make_trainer(tree: dict[str, Any]) -> Trainer:
    callbacks = list(make(tree["callbacks"]).values())
    if tree["trainer"].get("enable_progress_bar", True) and not any(isinstance(c, ProgressBar) for c in callbacks):
        callbacks.append(TrainingBar())
    try:
        return make(settle_precision(tree["trainer"]), callbacks=callbacks)
    # TypeError: devices that are none; ModuleNotFoundError: a logger whose package is not installed
    except (MisconfigurationException, ValueError, TypeError, ModuleNotFoundError) as error:
        do = "See the trainer options (dflash recipes), or set the trainer's arguments one by one"
        raise RecipeError([Fault("trainer", str(error).rstrip("."), do)], f"recipe {tree['name']!r}") from error
