"""One tree out of a recipe's file, those it names in ``defaults`` and overrides; with ``recipe_overrides`` the only
code that knows Hydra. What Hydra refuses is said in words of files and folders."""

from __future__ import annotations

import copy
import functools
import shutil
import tempfile
import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from dflash_lightning.recipe.faults import Fault, hint_for
from dflash_lightning.recipe.folders import (
    folder_words,
    folders_of,
    group_options,
    misplaced,
    recipe_names,
    recipes_folder,
)
from dflash_lightning.recipe.renamed import renamed_option

_PRIMARY = "dflash_lightning_primary_recipe"  # no configuration of Hydra or of a plugin has this name


class CannotCompose(ValueError):
    """A recipe that does not come to a tree, with the reasons."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("; ".join(map(str, faults)))
        self.faults = faults


def compose_file(file: Path, overrides: Sequence[str]) -> DictConfig:
    """The tree of a recipe file. ``_self_`` is the last of its ``defaults`` where it is not named.

    A command asks for a shipped recipe several times, and composing takes a tenth of a second. The tree of a shipped
    recipe is therefore kept for the same options, until a shipped file changes. Every caller gets a copy, to which the
    overrides of single values are applied by Hydra's own function.

    Raises:
        CannotCompose: a file or option that is not there, or that cannot be read or merged.
    """
    shipped = recipes_folder().resolve()
    try:
        if not file.resolve().is_relative_to(shipped) or any("${" in word for word in overrides):
            return _compose(file, overrides)
        groups = group_options(shipped)
        options = tuple(word for word in overrides if _chooses(word, groups))
        cfg = copy.deepcopy(_kept(file, options, _state_of(shipped)))
        values = OverridesParser.create().parse_overrides([word for word in overrides if word not in options])
        ConfigLoaderImpl._apply_overrides_to_config(values, cfg)
        return cfg
    except RecursionError:
        raise CannotCompose([*_circular(file)]) from None
    except MissingConfigException as error:
        raise CannotCompose([_missing(file, str(error.missing_cfg_file))]) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise CannotCompose([_refusal(file, str(error))]) from error


def _chooses(word: str, groups: Collection[str]) -> bool:
    """Whether an override chooses an option of a group, and does not set a value."""
    key = word.lstrip("+~").partition("=")[0]
    return key in groups or "/" in key or "@" in key


@functools.lru_cache(maxsize=64)
def _kept(file: Path, overrides: tuple[str, ...], state: frozenset[tuple[str, int, int]]) -> DictConfig:
    """As ``_compose``; ``state`` is that of all the files that may go into the tree."""
    return _compose(file, overrides)


def _state_of(folder: Path) -> frozenset[tuple[str, int, int]]:
    """Name, time of the last change and size of every YAML file below ``folder``."""
    found = ((path, path.stat()) for path in folder.rglob("*.yaml"))
    return frozenset((str(path), state.st_mtime_ns, state.st_size) for path, state in found)


def _compose(file: Path, overrides: Sequence[str]) -> DictConfig:
    """Hydra's tree of a file, composed from a copy under a name of ours.

    Hydra looks through its own packaged configurations (and those of its plugins) before any folder it is given, so
    that a file of the same name there would silently take the place of the user's.
    """
    quoted = ["'file://" + str(folder).replace("'", "\\'") + "'" for folder in folders_of(file)]
    search = f"hydra.searchpath=[{','.join(quoted)}]"
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Defaults list is missing `_self_`.*")
        primary = Path(folder) / f"{_PRIMARY}.yaml"
        shutil.copyfile(file, primary)
        try:
            with initialize_config_dir(folder, version_base="1.3"):
                return compose(_PRIMARY, overrides=[search, *overrides])
        except yaml.YAMLError as error:
            raise ValueError(str(error).replace(str(primary), str(file))) from error


def _missing(file: Path, name: str) -> Fault:
    """A file that ``defaults`` name and nobody has; ``name`` is ``group/option`` or a recipe."""
    group, _, option = name.strip("/").rpartition("/")
    full = f"{group}/{option}"
    beside = [known for folder in folders_of(file) for known in recipe_names(folder) if known.startswith(f"{group}/")]
    if beside:
        return Fault(str(file), f"its defaults name {full!r}, which is no recipe", _near(full, beside))
    if group:
        known = group_options(*folders_of(file)).get(group, [])
        where = folder_words(file, f"{group}/")
        do = renamed_option(group, option) or misplaced(file, group, option) or hint_for(option, known)
        return Fault(str(file), f"no option {group}={option} lies in {where}", do)
    known = [*recipe_names(), *(path.stem for path in file.parent.glob("*.yaml") if path != file)]
    return Fault(
        str(file), f"its defaults name {option!r}, which is no file in {folder_words(file)}", _near(option, known)
    )


def _near(name: str, known: list[str]) -> str:
    return hint_for(name, set(known))


def _refusal(file: Path, text: str) -> Fault:
    """Hydra's own words where they say what is meant, without its internal names."""
    words = " ".join(line.strip() for line in text.splitlines() if line.strip())
    words = words.partition(" Config search path:")[0].replace(_PRIMARY, file.stem).rstrip(".")
    if "must be a DictConfig" in words:
        return Fault(str(file), "is a list, but a recipe is a mapping of settings", "Write key: value lines")
    if "No match in the defaults list" in words and "override" in words:
        do = f"The groups are {', '.join(group_options(*folders_of(file)))}"
        return Fault(str(file), words, do)
    if "Could not delete from config" in words:
        return Fault(str(file), words, "See what there is with dflash show, without this override")
    return Fault(str(file), words, "See `dflash recipes` for recipes and options")


def _circular(file: Path) -> Iterator[Fault]:
    """Which files of a recipe's folder include themselves, once composing it has found no end."""
    found = [path for path in sorted(file.parent.rglob("*.yaml")) if path.stem in _included(path)]
    for path in found:
        what = "includes itself: in defaults, files of this folder go before shipped ones of the same name"
        yield Fault(str(path), what, "Rename it, or name another file in its defaults")
    if not found:
        yield Fault(
            str(file), "its defaults, or aliases in a file they name, lead back to themselves", "Break the circle"
        )


def _included(path: Path) -> list[str]:
    """The plain names in a file's ``defaults``."""
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    defaults = tree.get("defaults") if isinstance(tree, dict) else None
    return [entry for entry in defaults if isinstance(entry, str)] if isinstance(defaults, list) else []
