"""The run folder: which recipe a run is of, whether it is finished, and what to resume from."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shlex
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dflash_lightning import __version__
from dflash_lightning.files import (
    BEST_CHECKPOINT,
    LAST_CHECKPOINT,
    RECIPE_FILE,
    STATE_FILE,
    file_digest,
    open_locked,
    write_atomic,
)
from dflash_lightning.recipe.files import data_files
from dflash_lightning.recipe.load import recipe_text
from dflash_lightning.recipe.renamed import with_new_names

_LOG_FILES = ("events.out.tfevents.*", "metrics.csv", "hparams.yaml")
# Of a session and its device, of where the servers of its features are, and of what is done with the finished run.
_ADDRESSES = ("endpoints", "model", "folder", "in_flight", "ahead_mib", "timeout", "retries", "pause")
_OF_SESSION = ("trainer.max_time", "data.prefetch_features")
_MAY_DIFFER = (*_OF_SESSION, "measure", "target.layers", *(f"data.features.{name}" for name in _ADDRESSES))
_MINUTES = ("train_minutes", "evaluation_minutes")
_STATE: dict[str, Any] = {
    "finished": bool,
    **dict.fromkeys(("asked", "versions", "data", "training"), dict),
    **dict.fromkeys((*_MINUTES, "finished_at", "optimizer_steps", "tau", "loss", "rows"), int | float),
}
_BEING_WRITTEN = re.compile(rf"\.{re.escape(RECIPE_FILE)}\..+\.tmp")  # by another rank, at this moment
_START_ANEW = "Start the run anew with dflash fit ... --fresh (the earlier one is kept)."
_MEND = "dflash fit wrote it: mend it there, or start the run anew with --fresh (the earlier one is kept)."
LIBRARIES = ("torch", "lightning", "transformers", "tokenizers", "safetensors", "hydra-core", "omegaconf")


@dataclass(frozen=True)
class RunFolder:
    """A folder with ``recipe.yaml`` (resolved), ``run.json`` (state, versions, digests), ``checkpoints/`` and logs."""

    path: Path

    @property
    def last(self) -> Path:
        """What an interrupted run resumes from."""
        return self.path / LAST_CHECKPOINT

    @property
    def best(self) -> Path:
        """The best checkpoint by tokens committed per round."""
        return self.path / BEST_CHECKPOINT

    @property
    def recipe(self) -> Path:
        """The file with the run's recipe."""
        return self.path / RECIPE_FILE

    @property
    def state(self) -> dict[str, Any]:
        """Content of ``run.json``; empty before the run has begun.

        Raises:
            ValueError: the file is damaged.
        """
        file = self.path / STATE_FILE
        if not file.exists():
            return {}
        try:
            state = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file}: damaged ({error}). {_START_ANEW}") from error
        if not isinstance(state, dict):
            raise ValueError(f"{file}: damaged (it holds no JSON object). {_START_ANEW}")
        if wrong := _state_faults(state):
            raise ValueError(f"{file}: damaged ({', '.join(wrong)} is of another kind). {_START_ANEW}")
        return state

    @property
    def finished(self) -> bool:
        """Whether the fit reached its end."""
        return bool(self.state.get("finished"))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing this run; the lock goes with the process, however that ends.

        The locked file stands beside the folder, which ``set_aside`` renames. Where nothing can be made beside it
        (a mounted volume, say) there is no lock.

        Raises:
            ValueError: another process writes it now.
        """
        place = self.path.resolve()
        place.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(place.parent, os.W_OK):
            yield
            return
        lock = place.with_name(f".{place.name}.lock")
        held = open_locked(lock)
        if held is None:
            raise ValueError(
                f"run_dir: another dflash fit is writing {self.path} now ({lock} is locked). Wait until it has ended, "
                "or choose another folder with run_dir=FOLDER."
            )
        with held:
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)

    def remove_partial(self) -> None:
        """Delete what a kill left of a checkpoint that was being written; only for who holds the lock."""
        for left_over in self.last.parent.glob(".*.partial"):
            left_over.unlink(missing_ok=True)

    def remove_logs(self) -> None:
        """Delete the logs of an earlier try, for a run that starts anew; only files of kinds that loggers write."""
        for kind in _LOG_FILES:
            for left_over in (self.path / "logs").glob(kind):
                left_over.unlink(missing_ok=True)

    def check_same_run(self, cfg: DictConfig, *, but: Collection[str] = ()) -> None:
        """Refuse to go on in the folder of another run that has something to lose.

        How long a session may take (``trainer.max_time``), when it makes features (``data.prefetch_features``), the
        addresses of servers and the keys of ``but`` may differ.

        Raises:
            ValueError: the folder holds other files, or a checkpoint of another recipe or of changed data; says which
                keys and files differ.
        """
        there = [file.name for file in self.path.iterdir()] if self.path.exists() else []
        if not self.recipe.exists():  # asked after the look around: what rank 0 writes once it exists was not there
            if any(not _BEING_WRITTEN.fullmatch(name) for name in there):
                raise ValueError(
                    f"run_dir: {self.path} exists and is no run folder (it has no {RECIPE_FILE}). "
                    "Choose another with run_dir=FOLDER."
                )
            return
        if differing := self.at_stake(cfg, but):
            listed = "\n".join(f"    {line}" for line in differing)
            same_data = all(" there, " in line for line in differing)
            own = f"Go on with that recipe: dflash fit {self.path}.\n  Or choose" if same_data else "Choose"
            raise ValueError(
                f"run_dir: {self.path} holds a run of another recipe:\n{listed}\n"
                f"  {own} another folder with run_dir=FOLDER, or start anew with --fresh (the earlier run is kept)."
            )

    def at_stake(self, cfg: DictConfig, but: Collection[str] = ()) -> list[str]:
        """In what a run that is there differs from this recipe; nothing where none is, or none has a checkpoint yet."""
        has_something = self.recipe.exists() and (self.last.exists() or self.finished)
        return self._differing(cfg, but) if has_something else []

    def is_same_run(self, cfg: DictConfig) -> bool:
        """Whether the folder holds a run of this recipe and of these data."""
        return self.recipe.exists() and not self._differing(cfg)

    def is_longer(self, cfg: DictConfig, keys: Collection[str]) -> bool:
        """Whether ``cfg`` has another length (``keys``) than the recipe in the folder."""
        there = OmegaConf.create(read_recipe(self.recipe, resolve=False))
        return any(OmegaConf.select(there, key) != OmegaConf.select(cfg, key) for key in keys)

    def _differing(self, cfg: DictConfig, but: Collection[str] = ()) -> list[str]:
        """Keys and files in which this recipe is not that of the folder, in words."""
        theirs, ours = read_recipe(self.recipe, resolve=False), OmegaConf.create(recipe_text(cfg))
        digests = self.state.get("data", {})
        return [*_differences(theirs, ours, but=(*_MAY_DIFFER, *but))] + [
            f"{where}: the file's content has changed since"
            for where, digest in _digests(cfg).items()
            if digests.get(where, digest) != digest
        ]

    @property
    def next_command(self) -> str:
        """What to do with a finished run."""
        nodes = (read_recipe(self.recipe).get("callbacks") or {}).values()
        files = [node["prompts"] for node in nodes if isinstance(node, dict) and isinstance(node.get("prompts"), str)]
        return f"dflash evaluate --draft {self.path} --prompts {shlex.quote(files[0]) if files else 'FILE'}"

    @property
    def nothing_to_do(self) -> str:
        """What is said of a finished run that is to be fitted again."""
        return f"{self.path} is finished: nothing to do. Train again with --fresh, or see it: {self.next_command}"

    def set_aside(self) -> Path | None:
        """Rename an earlier run to ``<folder>.old-N``; null when there is none."""
        if not self.recipe.exists():
            return None
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.old-{number}")).exists():
            number += 1
        self.path.rename(aside)
        return aside

    def begin(self, cfg: DictConfig, *, asked: dict[str, Any] | None = None) -> None:
        """Write the resolved recipe, versions and digests of the data files.

        ``asked`` is what was typed, ``recipe`` and ``overrides``; null keeps what an earlier session was asked for.
        """
        text = f"# dflash-lightning {__version__}; again: dflash fit {self.recipe}\n{recipe_text(cfg)}"
        write_atomic(self.recipe, text)
        spent = {name: self.state.get(name, 0.0) if self.last.exists() else 0.0 for name in _MINUTES}
        asked = asked or self.state.get("asked")
        self._write_state({"finished": False, **spent, "asked": asked, "versions": versions(), "data": _digests(cfg)})

    def add_minutes(self, *, train: float, evaluation: float) -> None:
        """Count time spent in training (features included) and in evaluations, over all sessions of the run."""
        state = self.state
        for name, minutes in zip(_MINUTES, (train, evaluation), strict=True):
            state[name] += minutes
        self._write_state(state)

    def record(self, state: dict[str, Any]) -> None:
        """Make ``state`` the content of ``run.json``."""
        self._write_state(state)

    def note(self, **facts: Any) -> None:
        """Put ``facts`` into ``run.json``."""
        self._write_state({**self.state, **facts})

    def finish(self, **facts: Any) -> None:
        """Mark the run as finished now (``finished_at``, seconds since 1970); ``facts`` go into ``run.json``."""
        self._write_state({**self.state, "finished": True, "finished_at": time.time(), **facts})

    def _write_state(self, state: dict[str, Any]) -> None:
        write_atomic(self.path / STATE_FILE, json_text(state))


def _state_faults(state: dict[str, Any]) -> list[str]:
    """Keys of a ``run.json`` whose values are of another kind than ``dflash fit`` writes."""
    wrong = [key for key, kind in _STATE.items() if not isinstance(state.get(key), kind | None)]
    asked = state.get("asked")
    words = asked.get("overrides", []) if isinstance(asked, dict) else []
    whole = isinstance(words, list) and all(isinstance(word, str) for word in words)
    return wrong if whole else [*wrong, "asked.overrides"]


def read_recipe(file: Path, *, resolve: bool = True) -> dict[str, Any]:
    """A run's ``recipe.yaml`` as plain values, under today's names.

    Raises:
        ValueError: the file is no YAML mapping, or one of its parts that others read is of a wrong type.
    """
    try:
        tree: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=resolve)
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException, OSError) as error:
        raise ValueError(f"{file}: cannot be read as a recipe ({error}). {_MEND}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{file}: a recipe is a mapping of settings, but this is a {type(tree).__name__}. {_MEND}")
    for name in ("target", "data"):
        if not isinstance(tree.get(name, {}), dict):
            raise ValueError(f"{file}: {name} is {tree[name]!r}, but holds settings (a mapping). {_MEND}")
    template = tree.get("data", {}).get("chat_template_kwargs")
    if not isinstance(template, dict | None):
        raise ValueError(f"{file}: data.chat_template_kwargs is {template!r}, but holds settings (a mapping). {_MEND}")
    return with_new_names({str(key): value for key, value in tree.items()})


def json_text(tree: Any, *, indent: int | None = 2) -> str:
    """``tree`` as JSON text with an end of line; NaN and infinities, which JSON does not have, become null."""
    return json.dumps(_finite(tree), indent=indent, allow_nan=False) + "\n"


def _finite(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def versions() -> dict[str, str]:
    """Versions of everything a result may depend on."""
    found = {"dflash-lightning": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _digests(cfg: DictConfig) -> dict[str, str]:
    return {where: file_digest(path) for where, path in data_files(cfg).items()}


def _differences(theirs: Any, ours: Any, *, but: Collection[str] = ()) -> Iterator[str]:
    """``key: value in the folder, value asked for``, one line per leaf that differs and is not ``but`` or below it."""
    absent = "absent"
    old, new = dict(_leaves(theirs)), dict(_leaves(ours))
    for key in sorted(old.keys() | new.keys()):
        if any(f"{key}.".startswith(f"{part}.") for part in but):
            continue
        if old.get(key, absent) != new.get(key, absent):
            yield f"{key}: {old.get(key, absent)!r} there, {new.get(key, absent)!r} now"


def _leaves(tree: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    plain: Any = OmegaConf.to_container(tree, resolve=False) if OmegaConf.is_config(tree) else tree
    if isinstance(plain, dict):
        for key, value in plain.items():
            yield from _leaves(value, f"{where}.{key}" if where else str(key))
    else:
        yield where, plain
