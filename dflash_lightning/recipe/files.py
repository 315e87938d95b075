"""The files that a recipe names: looked for before anything is loaded, and listed for the run's record."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dflash_lightning.data.read.sources import Source, TrainFiles, make_sources
from dflash_lightning.files import DraftOrigin, find_draft_place, find_file
from dflash_lightning.recipe.faults import Fault, fault_of
from dflash_lightning.recipe.hints import fits
from dflash_lightning.recipe.nodes import faults_of
from dflash_lightning.recipe.tree import holds_unknown, mapping_at, select
from dflash_lightning.target.place import locate

# Keys that hold file names and sources: they are looked up from the working folder before anything is loaded.
_FILES, _SOURCES = ("callbacks.*.prompts", "callbacks.*.rows", "callbacks.*.rows.*"), "data.train"
# Second drafters of a way to decode.
_SECOND = ("decoding.builder.second", "callbacks.*.decoding.builder.second")
# Read once the run is finished: no part of its record.
_MEASURED = ("measure.prompts.*", "measure.expected.*", "measure.expected.*.*")


def data_files(cfg: DictConfig) -> dict[str, Path]:
    """Files that a checked recipe reads, by the key that names them (``data.train``; ``data.train[1]`` in a list).

    A pattern or a saved data set is every file behind it; a data set of the hub, which its revision pins, is none.
    """
    tree: Any = OmegaConf.to_container(cfg, resolve=True)
    files = {where: find_file(name, setting=where) for where, name in _named(tree)}
    for where, value in select(tree, _SOURCES):
        for at, source in _sources(value, where):
            found = source.parts(at)
            files |= {at if len(found) == 1 else f"{at}: {file}": file for file in found}
    return files


def file_faults(tree: dict[str, Any]) -> Iterator[Fault]:
    """Files, sources, drafters and target folders that are not there."""
    for where, name in _named(tree, (*_FILES, *_MEASURED)):
        yield from faults_of(partial(find_file, name, setting=where), where)
    for where, value in select(tree, _SOURCES):
        if fits(value, TrainFiles):  # reported where it does not
            yield from _source_faults(value, where)
    for where, name in _named(tree, _SECOND):
        yield from faults_of(partial(find_draft_place, name, setting=where), where)
    yield from _start_faults(tree.get("init_from"), tree.get("run_dir"))
    source = mapping_at(tree, "target").get("source")
    if isinstance(source, str):
        yield from faults_of(partial(locate, source), "target.source")


def _named(tree: Any, patterns: tuple[str, ...] = _FILES) -> Iterator[tuple[str, str]]:
    """Single files by the key that names them."""
    for pattern in patterns:
        yield from ((where, name) for where, name in select(tree, pattern) if isinstance(name, str))


def _start_faults(start: Any, run_dir: Any) -> Iterator[Fault]:
    """What a run starts from is there, and is not what it writes itself."""
    try:
        origin = DraftOrigin.read(start) if isinstance(start, str | dict) and not holds_unknown(start) else None
    except ValueError as error:
        yield fault_of(error, "init_from")
        return
    if origin is None:
        return
    start = origin.path
    yield from faults_of(partial(find_draft_place, start, setting="init_from"), "init_from")
    if isinstance(run_dir, str) and Path(start).expanduser().resolve().is_relative_to(Path(run_dir).resolve()):
        yield Fault("init_from", f"{start} lies in run_dir={run_dir}, which this run writes", "Choose another run_dir")


def _sources(value: Any, where: str) -> Iterator[tuple[str, Source]]:
    """Sources with the key that each is written under."""
    many = isinstance(value, list)
    for i, source in enumerate(make_sources(value, setting=where)):
        yield f"{where}[{i}]" if many else where, source


def _source_faults(value: Any, where: str) -> Iterator[Fault]:
    try:
        sources = list(_sources(value, where))
    except ValueError as error:
        yield fault_of(error, where)
        return
    for at, source in sources:
        yield from faults_of(partial(source.check, at), at)
