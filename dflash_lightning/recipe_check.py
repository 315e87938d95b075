"""Every fault of a recipe, found before any weight is loaded: the schema is the constructors' own signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, Trainer
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from dflash_lightning.data.sources import Source, TrainFiles, make_sources
from dflash_lightning.files import find_draft_place, find_file
from dflash_lightning.module import DraftModule
from dflash_lightning.recipe_faults import Fault, hint_for, split_message
from dflash_lightning.recipe_hints import advice, describe, fits, hints_of, is_settings_class
from dflash_lightning.recipe_make import locate, make
from dflash_lightning.recipe_ranges import range_faults
from dflash_lightning.target.load import locate as locate_target
from dflash_lightning.types import Alignment


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


class _Unknown:
    """Stands for a value that has its own fault already, or that is checked where it is written."""


UNKNOWN = _Unknown()
# Keys that hold file names and sources: they are looked up from the working folder before anything is loaded.
_FILE_KEYS, _SOURCE_KEYS = ("callbacks.*.prompts",), ("data.train",)


def list_faults(cfg: DictConfig) -> list[Fault]:
    """Everything that is wrong with a recipe; imports the classes it names, loads no weights, writes nothing."""
    faults: list[Fault] = []
    tree = _plain(cfg, "", faults)
    assert isinstance(tree, dict)
    faults += _check_tree(tree)
    return list(dict.fromkeys(faults))


# -- reading the tree -------------------------------------------------------------------------------------------------


def _plain(node: DictConfig | ListConfig, where: str, faults: list[Fault]) -> Any:
    """Plain containers with interpolations resolved; ``UNKNOWN`` where there is no value, with a fault saying so."""
    keys: list[Any] = list(node.keys()) if isinstance(node, DictConfig) else list(range(len(node)))
    values = {key: _plain_value(node, key, f"{where}.{key}" if where else str(key), faults) for key in keys}
    return values if isinstance(node, DictConfig) else list(values.values())


def _plain_value(node: Any, key: Any, where: str, faults: list[Fault]) -> Any:
    if OmegaConf.is_missing(node, key):
        example = f"{where}=VALUE"
        faults.append(
            Fault(where, "required, and the recipe leaves it open", f"Add {example} to the command, or set it")
        )
        return UNKNOWN
    try:
        value = node[key]
    except InterpolationToMissingValueError:
        return UNKNOWN  # reported where the value is missing
    except OmegaConfBaseException as error:
        text = OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index,call-overload]
        reason = str(error).splitlines()[0]
        faults.append(Fault(where, f"{text!r} cannot be resolved ({reason})", f"Set it: {where}=VALUE"))
        return UNKNOWN
    if isinstance(value, DictConfig | ListConfig):
        return UNKNOWN if OmegaConf.is_interpolation(node, key) else _plain(value, where, faults)
    return value


# -- checking it ------------------------------------------------------------------------------------------------------


def _check_tree(tree: dict[str, Any]) -> Iterator[Fault]:
    hints = hints_of(DraftModule)
    groups = {"data": LightningDataModule, "trainer": Trainer, "target": Any, "decoding": Any}
    settings = {name: hints[name] for name in inspect.signature(DraftModule).parameters if name != "target"}
    known = {"name": str, "run_dir": str, "callbacks": dict, **groups, **settings}
    for key in tree.keys() - known.keys():
        yield Fault(key, "unknown key", hint_for(key, known))
    for key in known.keys() - tree.keys():
        yield Fault(key, "missing", "Derive the recipe from a shipped one (defaults: [dflash, _self_]), or add it")
    for key, hint in known.items():
        if key in ("loss", "callbacks"):
            item = Callback if key == "callbacks" else hint.__args__[1]
            yield from _check_named(tree.get(key, {}), key, item)
        elif key in tree:
            yield from _check_value(tree[key], hint, key)
    yield from _check_alignment(tree.get("block"))
    yield from _check_suggested(tree.get("target"))
    yield from _check_monitors(tree.get("callbacks"))
    yield from range_faults(tree)
    yield from _check_files(tree)


def _check_named(nodes: Any, where: str, hint: Any) -> Iterator[Fault]:
    """A mapping of named ``_target_`` nodes: loss terms, callbacks."""
    if not isinstance(nodes, dict):
        yield Fault(where, f"{nodes!r} is not a mapping of named parts", f"Write {where}: {{name: {{_target_: ...}}}}")
        return
    for name, node in nodes.items():
        if isinstance(node, dict) and "_target_" not in node:
            what = f"has no _target_, only {sorted(node)}: settings of a part that is not chosen"
            yield Fault(f"{where}.{name}", what, f"Choose it ({where}=[...,{name}]), or remove these settings")
        else:
            yield from _check_value(node, hint, f"{where}.{name}")


def _check_value(value: Any, hint: Any, where: str) -> Iterator[Fault]:
    if value is UNKNOWN:
        return
    if isinstance(value, dict) and "_target_" in value:
        yield from _check_node(value, hint, where)
        return
    if is_settings_class(hint):
        yield Fault(
            where, f"{value!r} is no {hint.__name__}", "Write a mapping with _target_: <class path> and settings"
        )
    elif _holds_unknown(value):
        return
    elif isinstance(value, list) and any(isinstance(item, dict) and "_target_" in item for item in value):
        for i, item in enumerate(value):
            yield from _check_value(item, Any, f"{where}[{i}]")
    elif value == "None" or not fits(value, hint):
        kind = type(value).__name__
        yield Fault(where, f"{value!r} ({kind}) does not fit; allowed: {describe(hint)}", advice(value, hint))


def _holds_unknown(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(_holds_unknown(v) for v in (value.values() if isinstance(value, dict) else value))
    return value is UNKNOWN


# What the framework passes itself: a recipe that sets it would be ignored.
_SUPPLIED = {"data": {"target"}, "trainer": {"callbacks"}}
# Recipe-only keys of a node.
_RESERVED = {"target": {"suggested"}}


def _check_node(node: dict[str, Any], hint: Any, where: str) -> Iterator[Fault]:
    path = node["_target_"]
    try:
        function = locate(path)
    except ValueError as error:
        yield Fault(f"{where}._target_", f"{path!r} does not import ({error})", "Give a class's dotted path")
        return
    made = function if inspect.isclass(function) else hints_of(function).get("return", Any)
    if is_settings_class(hint) and is_settings_class(made) and not issubclass(made, hint):
        yield Fault(f"{where}._target_", f"{path!r} makes a {made.__name__}", f"{where} takes a {hint.__name__}")
        return
    own = list(_check_arguments(node, function, where))
    yield from own
    if not own and not _holds_unknown(node) and where.partition(".")[0] in _CHEAP:
        yield from _check_construction(node, where)


def _check_arguments(node: dict[str, Any], function: Any, where: str) -> Iterator[Fault]:
    hints, parameters = hints_of(function), dict(inspect.signature(function).parameters)
    supplied = _SUPPLIED.get(where, set())
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {n: p for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    allowed = named.keys() - supplied
    for key, value in node.items():
        at = f"{where}.{key}"
        if key == "_target_" or key in _RESERVED.get(where, set()):
            continue
        if key in supplied:
            yield Fault(at, "would be ignored: the framework sets it", f"Remove it{_INSTEAD.get(at, '')}")
        elif key in named:
            yield from _check_value(value, hints.get(key, Any), at)
        elif not open_ended:
            yield Fault(at, f"unknown key of {node['_target_']}", hint_for(key, allowed))
    for key in allowed - node.keys():
        if named[key].default is inspect.Parameter.empty:
            words = describe(hints.get(key, Any))
            yield Fault(f"{where}.{key}", f"required by {node['_target_']}", f"Set {where}.{key} ({words})")


_INSTEAD = {"trainer.callbacks": "; name callbacks in the group callbacks", "data.target": "; choose target=..."}
# Groups whose constructors take settings only and are cheap: their own checks of ranges count as faults too.
_CHEAP = ("block", "conditioning", "drafter", "head", "loss", "optim", "decoding")


def _check_construction(node: dict[str, Any], where: str) -> Iterator[Fault]:
    yield from _check_found(lambda: make(node), where)


def _check_alignment(block: Any) -> Iterator[Fault]:
    """Block size and label layout, as the drafter's config will refuse them once the target is loaded."""
    size = block.get("block_size") if isinstance(block, dict) else None
    if isinstance(size, int):
        yield from _check_found(partial(Alignment, size, mask_token_id=0), "block.block_size")


def _check_monitors(callbacks: Any) -> Iterator[Fault]:
    """A checkpoint that follows a decoding metric needs somebody who decodes, and must leave the moment to them.

    Lightning would say the first after an epoch, and the second never: it would rank weights by an older measurement.
    """
    nodes = {k: v for k, v in callbacks.items() if isinstance(v, dict)} if isinstance(callbacks, dict) else {}
    measured = any(str(node.get("_target_")).endswith("SpeculativeEval") for node in nodes.values())
    for name, node in nodes.items():
        monitor, where = node.get("monitor"), f"callbacks.{name}"
        if not str(monitor).startswith("decode/"):
            continue
        if not measured:
            what = f"{monitor!r} is never measured: no callback is a SpeculativeEval"
            yield Fault(f"{where}.monitor", what, "Add speculative_eval, or choose callbacks=[checkpoint_last]")
        elif str(node.get("_target_")).endswith("Checkpoint"):
            stale = f"saves when {monitor!r} may be of older weights"
            for key in ("every_n_train_steps", "train_time_interval"):
                if node.get(key) is not None:
                    yield Fault(f"{where}.{key}", stale, "Remove it: every evaluation saves if it is the best")
            if node.get("save_on_train_epoch_end") is not False:
                yield Fault(f"{where}.save_on_train_epoch_end", stale, "Set it to false: every evaluation saves then")


def _check_suggested(target: Any) -> Iterator[Fault]:
    """``target.suggested`` is optional; what it holds must be what recipes may read from it."""
    suggested = target.get("suggested", {}) if isinstance(target, dict) else {}
    known = {f.name: hint for f, hint in zip(fields(Suggested), hints_of(Suggested).values(), strict=False)}
    for key, value in suggested.items() if isinstance(suggested, dict) else ():
        at = f"target.suggested.{key}"
        if key not in known:
            yield Fault(at, "unknown key", hint_for(key, known))
        else:
            yield from _check_value(value, known[key], at)


def data_files(cfg: DictConfig) -> dict[str, Path]:
    """Files that a checked recipe reads, by the key that names them (``data.train``; ``data.train[1]`` in a list).

    A pattern or a saved data set is every file behind it; a data set of the hub, which its revision pins, is none.
    """
    tree = OmegaConf.to_container(cfg, resolve=True)
    files = {where: find_file(name, setting=where) for where, name in _select_all(tree, _FILE_KEYS) if name is not None}
    for where, value in _select_all(tree, _SOURCE_KEYS):
        for at, source in _sources(value, where):
            found = source.parts(at)
            files |= {at if len(found) == 1 else f"{at}: {file}": file for file in found}
    return files


def _sources(value: Any, where: str) -> Iterator[tuple[str, Source]]:
    """Sources with the key that each is written under."""
    many = isinstance(value, list)
    for i, source in enumerate(make_sources(value, setting=where)):
        yield f"{where}[{i}]" if many else where, source


def _check_files(tree: dict[str, Any]) -> Iterator[Fault]:
    for where, name in _select_all(tree, _FILE_KEYS):
        if isinstance(name, str):
            yield from _check_found(partial(find_file, name, setting=where), where)
    for where, value in _select_all(tree, _SOURCE_KEYS):
        if fits(value, TrainFiles):  # reported where it does not
            yield from _check_sources(value, where)
    yield from _check_start(tree.get("init_from"), tree.get("run_dir"))
    target = tree.get("target")
    source = target.get("source") if isinstance(target, dict) else None
    if isinstance(source, str):
        yield from _check_found(lambda: locate_target(source), "target.source")


def _check_start(start: Any, run_dir: Any) -> Iterator[Fault]:
    """What a run starts from is there, and is not what it writes itself."""
    if not isinstance(start, str):
        return
    yield from _check_found(partial(find_draft_place, start, setting="init_from"), "init_from")
    if isinstance(run_dir, str) and Path(start).expanduser().resolve().is_relative_to(Path(run_dir).resolve()):
        yield Fault("init_from", f"{start} lies in run_dir={run_dir}, which this run writes", "choose another run_dir")


def _check_sources(value: Any, where: str) -> Iterator[Fault]:
    try:
        sources = list(_sources(value, where))
    except ValueError as error:
        yield split_message(str(error), where)
        return
    for at, source in sources:
        yield from _check_found(partial(source.check, at), at)


def _check_found(look: Callable[[], Any], where: str) -> Iterator[Fault]:
    try:
        look()
    except ValueError as error:
        yield split_message(str(error), where)


def _select_all(tree: Any, patterns: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for pattern in patterns:
        yield from _select(tree, pattern.split("."), "")


def _select(node: Any, parts: list[str], where: str) -> Iterator[tuple[str, Any]]:
    if not parts:
        yield where, node
    elif isinstance(node, dict):
        for key in node if parts[0] == "*" else [parts[0]] if parts[0] in node else []:
            yield from _select(node[key], parts[1:], f"{where}.{key}" if where else key)
