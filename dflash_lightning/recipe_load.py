"""From a recipe's name or file and overrides to one tree; the only code that knows Hydra.

Needs neither torch nor Lightning, so that ``dflash show`` and ``dflash recipes`` answer at once.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dflash_lightning.files import RECIPE_FILE
from dflash_lightning.recipe_faults import Fault, RecipeError, hint_for

_PRIMARY = "dflash_lightning_primary_recipe"  # no configuration of Hydra or of a plugin has this name
# Any value of this group that is no option is a model's path, hub id or GGUF file: "target=Qwen/Qwen3-4B".
_TARGET, _CUSTOM_TARGET = "target", "custom"


def recipes_folder() -> Path:
    """The folder of the shipped recipes."""
    return Path(str(files("dflash_lightning") / "recipes"))


def recipe_names() -> list[str]:
    """The shipped recipes."""
    return sorted(path.stem for path in recipes_folder().glob("*.yaml"))


def group_options(*folders: Path) -> dict[str, list[str]]:
    """Options by group: every sub-folder of ``folders`` (the shipped recipes, if none is given) is a group."""
    options: dict[str, set[str]] = {}
    for path in (path for folder in folders or (recipes_folder(),) for path in folder.glob("*/*.yaml")):
        options.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(names) for group, names in sorted(options.items())}


def summary_of(path: Path) -> str:
    """The first comment line of a recipe or option file."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The recipe as one tree, interpolations not yet resolved.

    ``name_or_path`` is a shipped name, a YAML file in any folder (its ``defaults`` may name shipped recipes and
    options, and recipes and options of its own folder, which go before shipped ones of that name), or a run folder,
    whose saved recipe is taken. A shipped name always means the shipped recipe, whatever lies in the working folder: a
    file or run folder of that name is written as ``smoke.yaml`` or ``./smoke``. ``overrides`` follow
    Hydra's grammar: ``optim.lr=1e-3``, ``drafter=other_option``, ``~callbacks.speculative_eval``.

    A key that the recipe does not have is let in here, so that ``check_recipe`` can report it with all other faults.

    Raises:
        RecipeError: no such recipe or option, or a file or override that cannot be parsed.
    """
    file = _find(name_or_path)
    options = group_options(recipes_folder(), file.parent)
    faults = [*_yaml_traps(file)]
    grammar: list[str] = []
    for text in overrides:
        grammar += _translate(text, options, faults)
    if faults:
        raise RecipeError(faults, name_or_path)
    try:
        cfg = _compose(file, grammar)
    except RecursionError:
        raise RecipeError([*_circular(file)], name_or_path) from None
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        text = " ".join(line.strip() for line in str(error).splitlines() if line.strip()).replace(_PRIMARY, file.stem)
        raise RecipeError(
            [Fault(str(file), text, "See `dflash recipes` for recipes and options")], name_or_path
        ) from error
    OmegaConf.set_struct(cfg, False)
    if "name" not in cfg or OmegaConf.is_missing(cfg, "name"):
        cfg.name = file.stem
    return cfg


def _compose(file: Path, overrides: list[str]) -> DictConfig:
    """Hydra's tree of a file, composed from a copy under a name of ours.

    Hydra looks through its own packaged configurations (and those of its plugins) before any folder it is given, so
    that a file of the same name there would silently take the place of the user's.
    """
    folders = dict.fromkeys([file.parent.resolve(), recipes_folder().resolve()])
    quoted = ["'file://" + str(folder).replace("'", "\\'") + "'" for folder in folders]
    search = f"hydra.searchpath=[{','.join(quoted)}]"
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(file, Path(folder) / f"{_PRIMARY}.yaml")
        with initialize_config_dir(folder, version_base="1.3"):
            return compose(_PRIMARY, overrides=[search, *overrides])


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


def _find(name_or_path: str) -> Path:
    if name_or_path in recipe_names():
        return recipes_folder() / f"{name_or_path}.yaml"
    path = Path(name_or_path).expanduser()
    if path.is_dir() and (path / RECIPE_FILE).exists():
        return path / RECIPE_FILE
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        if path.is_file():
            return path
        what = "has no recipe.yaml" if path.is_dir() else "no such file"
        raise RecipeError(
            [Fault(name_or_path, what, f"Give a YAML file, or one of {', '.join(recipe_names())}")], "RECIPE"
        )
    do = f"{hint_for(name_or_path, recipe_names())}; a file or run folder of your own is written NAME.yaml or ./NAME"
    raise RecipeError([Fault(name_or_path, "no recipe of that name is shipped", do)], "RECIPE")


# -- overrides --------------------------------------------------------------------------------------------------------


def _translate(text: str, options: dict[str, list[str]], faults: list[Fault]) -> list[str]:
    """An override in Hydra's words; a key it does not know is added instead of refused (``++``)."""
    group, _, value = text.partition("=")
    if group == _TARGET and not value.startswith("[") and value not in (*options[_TARGET], "null", ""):
        near = get_close_matches(value, options[_TARGET], n=1, cutoff=0.75)
        if near and "/" not in value and not Path(value).exists():
            faults.append(Fault(text, "no such option, and no such path", hint_for(value, options[_TARGET])))
            return []
        quoted = value.replace("\\", "\\\\").replace('"', '\\"')
        return [f"{_TARGET}={_CUSTOM_TARGET}", f'{_TARGET}.source="{quoted}"']
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        faults.append(
            Fault(text, f"cannot be read as an override ({reason})", "Write key=value, quoting odd characters")
        )
        return []
    if override.is_sweep_override():
        do = "Write key=[a,b] for a list, and one run per value otherwise"
        faults.append(Fault(text, "names several values, but a run has one", do))
        return []
    if override.key_or_group in options:
        faults += _option_faults(override, options[override.key_or_group])
        return [text]
    return [f"++{text}" if override.type is OverrideType.CHANGE else text]


def _option_faults(override: Override, options: list[str]) -> Iterator[Fault]:
    value = override.value()
    if value is None and override.type is not OverrideType.DEL:
        yield Fault(override.input_line or "", "a group takes an option, not null", hint_for("", options))
    for name in value if isinstance(value, list) else [value]:
        if isinstance(name, str) and override.type is not OverrideType.DEL and name not in options:
            yield Fault(f"{override.key_or_group}={name}", "no such option", hint_for(name, options))


# -- YAML -------------------------------------------------------------------------------------------------------------

_TRAPS = re.compile(r"[-+]?(\d+(:[0-5]?\d)+|0\d+)$")


def _yaml_traps(file: Path) -> Iterator[Fault]:
    """Plain scalars that YAML silently turns into another number: ``1:00:00`` (base 60) and ``0010`` (octal).

    And what no tree can hold: an alias inside its own anchor.
    """
    with file.open(encoding="utf-8") as stream:
        try:
            events = list(yaml.parse(stream, Loader=yaml.SafeLoader))
        except yaml.YAMLError as error:
            place = str(error).replace("\n", " ")
            yield Fault(str(file), f"is no valid YAML ({place})", "Mend the line it names")
            return
    open_anchors: list[str | None] = []
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            open_anchors.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            open_anchors.pop()
        elif isinstance(event, yaml.AliasEvent) and event.anchor in open_anchors:
            at = f"{file}:{event.start_mark.line + 1}"
            yield Fault(at, f"*{event.anchor} stands inside what it names, without end", "Write the value meant")
        if isinstance(event, yaml.ScalarEvent) and event.style is None and _TRAPS.match(event.value):
            at = f"{file}:{event.start_mark.line + 1}"
            number = yaml.safe_load(event.value)
            yield Fault(
                at, f"YAML reads {event.value} as {number}", f'Quote it ("{event.value}") or write the number meant'
            )


def recipe_text(cfg: DictConfig) -> str:
    """The recipe as YAML with every value resolved; it loads to the same run.

    A whole node that is used in a second place stays a reference (``${decoding}``), so that a later edit reaches both.
    Open values stay ``???``. What the target suggested is left out: it has gone into the settings that read it.
    """
    tree: dict[str, Any] = _resolved(cfg)
    if isinstance(tree.get(_TARGET), dict):
        tree[_TARGET].pop("suggested", None)
    plain_first = sorted(tree, key=lambda key: isinstance(tree[key], dict))
    return OmegaConf.to_yaml(OmegaConf.create({key: tree[key] for key in plain_first}))


def _resolved(node: DictConfig | ListConfig) -> Any:
    keys: list[Any] = list(node.keys()) if isinstance(node, DictConfig) else list(range(len(node)))
    raw: Any = OmegaConf.to_container(node, resolve=False)
    values = [_resolved_value(node, key, raw[key]) for key in keys]
    return dict(zip(keys, values, strict=True)) if isinstance(node, DictConfig) else values


def _resolved_value(node: Any, key: Any, raw: Any) -> Any:
    if OmegaConf.is_missing(node, key):
        return raw
    try:
        value = node[key]
    except OmegaConfBaseException:  # it names an open value: keep the reference
        return raw
    if isinstance(value, DictConfig | ListConfig):
        return raw if OmegaConf.is_interpolation(node, key) else _resolved(value)
    return value
