"""Every fault of a recipe, found before any weight is loaded.

In two passes. ``early_faults`` reads text alone: YAML, the files that are named, and the source of the classes that are
named. It needs no torch, so that what is mistyped is said within a second. With ``by_import`` the classes are imported,
held to their base classes, and the cheap ones made, whose own checks count; ``recipe.list_faults`` adds what the
target's configuration tells.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any, get_args

from omegaconf import DictConfig

from dflash_lightning.data.settings import check_data
from dflash_lightning.recipe.arguments import Reader, from_source, source_defaults
from dflash_lightning.recipe.evaluation import EXPECTED_PREFIX, company_faults, is_measured
from dflash_lightning.recipe.faults import Fault, hint_for
from dflash_lightning.recipe.files import file_faults
from dflash_lightning.recipe.hints import hints_of
from dflash_lightning.recipe.nodes import NodeChecker, class_of, faults_of
from dflash_lightning.recipe.prefetch import prefetch_faults
from dflash_lightning.recipe.ranges import range_faults
from dflash_lightning.recipe.renamed import renamed_faults
from dflash_lightning.recipe.synonyms import with_meant
from dflash_lightning.recipe.trainer import trainer_faults
from dflash_lightning.recipe.tree import mapping_at, plain_tree

_MODULE = "dflash_lightning.module.DraftModule"
_DRAFT_DATA = "dflash_lightning.data.DraftData"
_MEASURE = "dflash_lightning.bench.Measure"
# The base classes of groups that are no arguments of the module, and of the callbacks.
_DATA, _TRAINER, _CALLBACK = (f"lightning.pytorch.{name}" for name in ("LightningDataModule", "Trainer", "Callback"))


@dataclass(frozen=True)
class Suggested:
    """What a target option proposes for drafters of that target; recipes read it as ``${target.suggested.<name>}``.

    It never reaches ``load_target``. ``max_length`` counts tokens of a training row, ``decay`` is the loss decay that
    goes with the block size (DFlash sec. 4.2).
    """

    block_size: int
    num_layers: int
    max_length: int
    decay: float


# A recipe written before there was such a group, or one whose trainer names its logger itself, has none; most recipes
# measure nothing.
_OPTIONAL = {"logger", "measure"}


def early_faults(cfg: DictConfig) -> list[Fault]:
    """What is wrong with a recipe as far as text tells, without importing what it names."""
    faults: list[Fault] = []
    return find_faults(plain_tree(cfg, faults), faults, from_source)


def find_faults(tree: dict[str, Any], open_values: list[Fault], read: Reader) -> list[Fault]:
    """What is wrong with a recipe in itself; ``tree`` and ``open_values`` are what ``plain_tree`` makes of it.

    ``read`` says what each ``_target_`` takes.
    """
    faults = [*open_values, *_check_tree(tree, read)]
    renamed = list(renamed_faults(tree))
    faults = [fault for fault in faults if fault.where not in {new.where for new in renamed}] + renamed
    known = {fault.where for fault in faults}
    faults += [fault for fault in range_faults(tree) if fault.where not in known]  # the classes' own words go first
    return list(dict.fromkeys(map(with_meant, faults)))


def _check_tree(tree: dict[str, Any], read: Reader) -> Iterator[Fault]:
    checker, module = NodeChecker(read), read(_MODULE)
    assert module is not None
    groups = {
        "data": class_of(read, _DATA),
        "trainer": class_of(read, _TRAINER),
        "target": Any,
        "decoding": Any,
        "logger": Any,
        "measure": class_of(read, _MEASURE) | None,
    }
    settings = {name: hint for name, hint in module.hints.items() if name != "target"}
    known = {"name": str, "run_dir": str, "callbacks": dict, **groups, **settings}
    for key in tree.keys() - known.keys():
        yield Fault(key, "unknown key", hint_for(key, known))
    for key in known.keys() - tree.keys() - _OPTIONAL:
        yield Fault(key, "missing", "Derive the recipe from a shipped one (defaults: [dflash, _self_]), or add it")
    for key, hint in known.items():
        if key in ("loss", "callbacks"):
            item = class_of(read, _CALLBACK) if key == "callbacks" else get_args(hint)[1]
            yield from checker.named(tree.get(key, {}), key, item)
        elif key in tree:
            yield from checker.value(tree[key], hint, key)
    if tree.get("loss") == {}:
        yield Fault("loss", "no term is given, so there is nothing to train on", "Add one, e.g. loss=cross_entropy")
    yield from _check_suggested(tree.get("target"), checker)
    yield from _check_monitors(tree.get("callbacks"))
    yield from company_faults(tree)
    yield from _check_logger(tree.get("logger"))
    yield from trainer_faults(tree.get("trainer"))
    yield from _check_data(mapping_at(tree, "data"))
    yield from prefetch_faults(tree)
    yield from file_faults(tree)


def _check_data(node: dict[str, Any]) -> Iterator[Fault]:
    """Settings of ``DraftData`` that do not go together, which it would say only after the target is loaded."""
    if node.get("_target_") != _DRAFT_DATA:
        return
    settings = {**source_defaults(_DRAFT_DATA), **node}
    asked = {name: settings[name] for name in inspect.signature(check_data).parameters}
    if isinstance(asked["max_length"], int) and isinstance(asked["row_tokens"], int | None):
        yield from faults_of(lambda: check_data(**asked), "data")


def _check_monitors(callbacks: Any) -> Iterator[Fault]:
    """A checkpoint that follows a decoding metric needs somebody who decodes, and must leave the moment to them.

    Lightning would say the first after an epoch, and the second never: it would rank weights by an older measurement.
    """
    nodes = {k: v for k, v in mapping_at(callbacks).items() if isinstance(v, dict)}
    for name, node in nodes.items():
        monitor, where = str(node.get("monitor")), f"callbacks.{name}"
        if not monitor.startswith("decode/"):
            continue
        if not is_measured(monitor, nodes.values()):
            expected = monitor.startswith(EXPECTED_PREFIX)
            kind, option = ("an ExpectedTau", "expected_tau") if expected else ("a SpeculativeEval", "speculative_eval")
            what = f"{monitor!r} is never measured: no callback is {kind}"
            yield Fault(f"{where}.monitor", what, f"Add {option}, or choose callbacks=[checkpoint_last]")
        elif str(node.get("_target_")).endswith("Checkpoint"):
            stale = f"saves when {monitor!r} may be of older weights"
            for key in ("every_n_train_steps", "train_time_interval"):
                if node.get(key) is not None:
                    yield Fault(f"{where}.{key}", stale, "Remove it: every evaluation saves if it is the best")
            if node.get("save_on_train_epoch_end") is not False:
                yield Fault(f"{where}.save_on_train_epoch_end", stale, "Set it to false: every evaluation saves then")


def _check_logger(logger: Any) -> Iterator[Fault]:
    """A logger whose package is missing; its class would say so only when it is made."""
    path = str(logger.get("_target_")) if isinstance(logger, dict) else ""
    if path.endswith("WandbLogger") and find_spec("wandb") is None:
        yield Fault("logger", "the Python package wandb is not installed", "Run: pip install wandb; or use logger=csv")


def _check_suggested(target: Any, checker: NodeChecker) -> Iterator[Fault]:
    """``target.suggested`` is optional; what it holds must be what recipes may read from it."""
    suggested = target.get("suggested", {}) if isinstance(target, dict) else {}
    known = {f.name: hint for f, hint in zip(fields(Suggested), hints_of(Suggested).values(), strict=False)}
    for key, value in suggested.items() if isinstance(suggested, dict) else ():
        at = f"target.suggested.{key}"
        if key not in known:
            yield Fault(at, "unknown key", hint_for(key, known))
        else:
            yield from checker.value(value, known[key], at)
