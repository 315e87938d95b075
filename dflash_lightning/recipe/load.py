"""From a recipe's name or file and overrides to one tree.

Needs neither torch nor Lightning, so that ``dflash show`` and ``dflash recipes`` answer at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dflash_lightning.files import RECIPE_FILE, STATE_FILE
from dflash_lightning.recipe.compose import CannotCompose, compose_file
from dflash_lightning.recipe.evaluation import has_evaluation, is_measured
from dflash_lightning.recipe.faults import Fault, RecipeError, nearest
from dflash_lightning.recipe.folders import recipe_name, recipe_names, recipes_folder
from dflash_lightning.recipe.overrides import TARGET, Overrides
from dflash_lightning.recipe.renamed import with_new_names
from dflash_lightning.recipe.yaml import yaml_traps

# Groups whose parts have names and are used together.
_NAMED = ("loss", "callbacks")
_EVALUATION = "callbacks.speculative_eval"


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The recipe as one tree, interpolations not yet resolved.

    ``name_or_path`` is a shipped name (``bench/dflash`` in a sub-folder), a YAML file in any folder (its ``defaults``
    may name shipped recipes and options, and recipes and options of its own folder, which go before shipped ones of
    that name), or a run folder, whose saved recipe is taken. A shipped name always means the shipped recipe, whatever
    lies in the working folder: a file or run folder of that name is written as ``smoke.yaml`` or ``./smoke``. Settings
    that a run has saved under an earlier name are given today's.

    ``overrides`` follow Hydra's grammar: ``optim.lr=1e-3``, ``drafter=other_option``. Loss terms and callbacks have
    names; an option chosen for their group replaces all of them, and what the recipe says of those it replaced goes
    with them. A single one is taken out by ``~loss.cross_entropy`` here, and by ``cross_entropy: null`` in a file.
    Without ``callbacks.speculative_eval`` nothing decodes during training, so that checkpoints which follow its
    figures go too, and the last one is kept after every epoch.

    A key that the recipe does not have is let in here, so that ``check_recipe`` can report it with all other faults.

    Raises:
        RecipeError: no such recipe or option, or a file or override that cannot be parsed.
    """
    cfg, faults, _ = load_with_faults(name_or_path, overrides)
    if faults or cfg is None:
        raise RecipeError(faults, name_or_path)
    return cfg


def load_with_faults(
    name_or_path: str, overrides: Sequence[str] = ()
) -> tuple[DictConfig | None, list[Fault], frozenset[str]]:
    """As ``load_recipe``, but what can be loaded is returned beside the faults, so that the rest can be checked too.

    Overrides with faults are left out. The set names the groups whose option does not exist: what is said of them means
    nothing. There is no tree where the file itself cannot be composed.

    Raises:
        RecipeError: there is no such recipe.
    """
    file = find_recipe(name_or_path)
    asked = Overrides(file, list(overrides))
    faults = [*yaml_traps(file), *asked.faults]
    if len(faults) > len(asked.faults):
        return None, faults, frozenset(asked.refused)
    try:
        cfg = compose_file(file, asked.words)
    except CannotCompose as error:
        return None, [*error.faults, *faults], frozenset(asked.refused)
    if file.name == RECIPE_FILE and (file.parent / STATE_FILE).exists():
        saved: Any = OmegaConf.to_container(cfg, resolve=False)
        cfg = OmegaConf.create(with_new_names(saved))
    OmegaConf.set_struct(cfg, False)
    if "name" not in cfg or OmegaConf.is_missing(cfg, "name"):
        cfg.name = recipe_name(file)
    _drop_unwanted(cfg, asked)
    return cfg, faults, frozenset(asked.refused)


def _drop_unwanted(cfg: DictConfig, asked: Overrides) -> None:
    """Take out named parts that are null, and what a file says of parts that an option on the command line replaced."""
    raw: Any = OmegaConf.to_container(cfg, resolve=False)
    gone = {word.removeprefix("~") for word in asked.words if word.startswith("~")}
    for group in _NAMED:
        nodes = raw.get(group)
        for name, node in nodes.items() if isinstance(nodes, dict) else ():
            key = f"{group}.{name}"
            settings_only = isinstance(node, dict) and "_target_" not in node
            left_over = settings_only and group in asked.chosen
            if node is None or (left_over and not any(k.startswith(f"{key}.") for k in asked.set_keys)):
                del cfg[group][name]
                gone.add(key)
    if _EVALUATION in gone and isinstance(cfg.get("callbacks"), DictConfig):
        _stop_following(cfg.callbacks)


def _stop_following(callbacks: DictConfig) -> None:
    """Without evaluation: no checkpoint that follows its figures, and the last one after every epoch.

    ``recent`` of the option ``checkpoint`` relies on evaluations, before each of which the last checkpoint is saved.
    """
    nodes: Any = OmegaConf.to_container(callbacks, resolve=False)
    if has_evaluation(nodes.values()):
        return
    following = [name for name, node in nodes.items() if isinstance(node, dict) and _follows_nobody(node, nodes)]
    for name in following:
        del callbacks[name]
    if following and "recent" in nodes:
        last = OmegaConf.load(recipes_folder() / "callbacks" / "checkpoint_last.yaml")
        assert isinstance(last, DictConfig)
        callbacks["recent"] = last["recent"]


def _follows_nobody(node: dict[str, Any], nodes: dict[str, Any]) -> bool:
    """Whether it follows a figure of decoding that none of ``nodes`` measures."""
    monitor = str(node.get("monitor"))
    return monitor.startswith("decode/") and not is_measured(monitor, nodes.values())


def find_recipe(name_or_path: str) -> Path:
    """The file of a shipped recipe, of a path, or of a run folder."""
    if name_or_path in recipe_names():
        return recipes_folder() / f"{name_or_path}.yaml"
    path = Path(name_or_path).expanduser()
    if path.is_dir() and (path / RECIPE_FILE).exists():
        return path / RECIPE_FILE
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        if path.is_file():
            return path
        what = "has no recipe.yaml" if path.is_dir() else "no such file"
        do = f"Give a YAML file, or a shipped recipe. {recipe_hint(name_or_path)}"
        raise RecipeError([Fault(name_or_path, what, do)], "RECIPE")
    do = f"{recipe_hint(name_or_path)}; a file or run folder of your own is written NAME.yaml or ./NAME"
    raise RecipeError([Fault(name_or_path, "no recipe of that name is shipped", do)], "RECIPE")


def recipe_hint(name: str) -> str:
    """Which shipped recipes a name is near to, and how to see all of them: there are too many for a message."""
    return f"{nearest(name, recipe_names())}`dflash recipes` lists all"


def recipe_text(cfg: DictConfig) -> str:
    """The recipe as YAML with every value resolved; it loads to the same run.

    A whole node that is used in a second place stays a reference (``${decoding}``), so that a later edit reaches both.
    Open values stay ``???``. What the target suggested is left out: it has gone into the settings that read it.
    """
    tree: dict[str, Any] = _resolved(cfg)
    if isinstance(tree.get(TARGET), dict):
        tree[TARGET].pop("suggested", None)
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
