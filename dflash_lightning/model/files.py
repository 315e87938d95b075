"""A drafter on disk: z-lab's tensor names, strict loading, and folders that are written as a whole."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import cached_file, logging

from dflash_lightning.draft_config import NESTED, DraftConfig, check_contract
from dflash_lightning.files import CONFIG_FILE
from dflash_lightning.model.foreign import OURS, ForeignFormat, adopt_settings, explain_tensors, source_of
from dflash_lightning.model.stated import check_kinds
from dflash_lightning.model.vocabulary import VOCABULARY_MAPS, take_extras
from dflash_lightning.model.weights import check_tensors, check_unquantised, stored_shapes, weight_files

WEIGHTS_FILE = "model.safetensors"
PARTS = ("conditioning.", "drafter.", "head.")
_BLOCKS = (NESTED, "rope_parameters", "rope_scaling", "target", "transformer_layer_config", "speculators_config")
COMPILED = "_orig_mod."
# What libraries raise of settings that they cannot compute with.
_UNREADABLE = (TypeError, RuntimeError, ArithmeticError, LookupError, AttributeError)


def file_names(model: torch.nn.Module) -> dict[str, str]:
    """The name under which each entry of ``model.state_dict()`` is saved: z-lab's, without the part's name in front.

    ``conditioning.fc.weight`` is saved as ``fc.weight``. What ``torch.compile`` puts in front of a module is left out.
    """
    names = {key: _file_name(key) for key in model.state_dict()}
    assert len(set(names.values())) == len(names), "two parts save a tensor under one name"
    return names


def _file_name(key: str) -> str:
    name = key.replace(COMPILED, "")
    part = next((part for part in PARTS if name.startswith(part)), "")
    return name.removeprefix(part)


def read_draft_config(folder: str | Path, **hub: Any) -> DraftConfig:
    """The configuration in ``folder`` (or in a hub repository); other programs' files get the parts they imply.

    Raises:
        ValueError: there is no config.json, it is not a drafter's, or one of a method that is not supported.
    """
    return _make_config(_read_json(folder, **hub), folder)


def _read_json(folder: str | Path, **hub: Any) -> dict[str, Any]:
    path = Path(folder) / CONFIG_FILE
    if Path(folder).exists() and not path.is_file():
        raise ValueError(
            f"{folder}: there is no {CONFIG_FILE}, so it holds no drafter. Give the folder of a saved drafter."
        )
    return read_object(Path(str(cached_file(str(folder), CONFIG_FILE, **hub))), "Give the folder of a saved drafter.")


def read_object(file: Path, advice: str) -> dict[str, Any]:
    """The JSON object in ``file``; ``advice`` says what to do where there is none.

    Raises:
        ValueError: it is no text, no JSON, or no object with objects in the places where configurations have some.
    """
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # of decoding as well as of parsing
        raise ValueError(f"{file} cannot be read as JSON ({error}). {advice}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file} holds {str(raw)[:40]} instead of an object of settings. {advice}")
    for name in _BLOCKS:
        if not isinstance(raw.get(name) or {}, dict):
            raise ValueError(f"{file}: {name} is {str(raw[name])[:40]} instead of an object of settings. {advice}")
    return raw


def _make_config(raw: Mapping[str, Any], folder: str | Path) -> DraftConfig:
    check_contract(raw, str(folder))
    check_unquantised(raw, str(folder))
    check_kinds(raw, str(folder))
    try:
        settings = dict(raw) if source_of(raw) is OURS else adopt_settings(raw, str(folder))
        return DraftConfig.from_dict(settings)
    except StrictDataclassError as error:
        raise ValueError(f"{folder}: {CONFIG_FILE} contradicts itself ({error.__cause__}). Correct it.") from error
    except _UNREADABLE as error:  # settings of transformers' own, which are not known here
        raise ValueError(f"{folder}: {CONFIG_FILE} cannot be read ({_said(error)}). Correct it.") from error


def load_draft_weights(
    cls: type[Any], load: Callable[..., Any], path: str | Path, *args: Any, config: Any = None, **kwargs: Any
) -> Any:
    """What ``load`` (transformers' ``from_pretrained``) makes of ``path``, under our names. Any difference is an error.

    Raises:
        ValueError: tensors are missing, unexpected or of another shape (all of them are listed), or a file is damaged.
    """
    hub = {key: kwargs[key] for key in ("revision", "cache_dir", "token", "local_files_only") if key in kwargs}
    source = OURS
    if config is None:
        raw = _read_json(path, **hub)
        source, config = source_of(raw), _make_config(raw, path)
    else:
        check_unquantised(config.to_dict(), str(path))
    planned = planned_model(cls, config, str(path))
    names = file_names(planned)
    want_info = kwargs.pop("output_loading_info", False)
    mapping = _key_mapping(names, source)
    kwargs |= {"key_mapping": mapping, "output_loading_info": True, "ignore_mismatched_sizes": True}
    _check_weights_there(Path(path))
    with without_load_report():  # the faults are listed here, and extras are no fault
        try:
            _check_shapes(planned, _renamed(stored_shapes(path, **hub), mapping, str(path)), source, str(path))
            model, info = load(str(path), *args, config=config, **kwargs)
        except SafetensorError as error:
            raise _unreadable(path, WEIGHTS_FILE, error) from error
    extras = _extras_of(source) & {*info["unexpected_keys"]}
    _check_loaded(info, extras, str(path))
    check_tensors({names[key]: value for key, value in model.state_dict().items()}, str(path))
    if extras:
        take_extras(model, read_tensors(path, sorted(extras), **hub), str(path))
    model._weight_conversions = []  # saving renames by ``file_names``, not by transformers' record of this load
    return (model, info) if want_info else model


def _check_weights_there(folder: Path) -> None:
    """Refuse a folder of settings alone; what is no folder here is the hub's.

    Raises:
        ValueError: it holds no file of weights.
    """
    kinds = ("*.safetensors", "*.bin", "*.safetensors.index.json")
    if folder.is_dir() and not any(any(folder.glob(kind)) for kind in kinds):
        raise ValueError(f"{folder}: it holds {CONFIG_FILE} and no weights ({WEIGHTS_FILE}). Copy them there too.")


def _unreadable(folder: str | Path, file: str, error: SafetensorError) -> ValueError:
    there = Path(folder) / file
    named = there if there.is_file() else f"{folder}: a file of its weights"
    return ValueError(f"{named} cannot be read ({error}): cut short, or no safetensors. Copy or export it again.")


def planned_model(cls: type[Any], config: DraftConfig, where: str) -> Any:
    """The model that a file's settings describe, without weights.

    Raises:
        ValueError: they describe none, in our words or in those of the library that cannot build it.
    """
    try:
        with torch.device("meta"):
            return cls(config)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    except _UNREADABLE as error:
        raise ValueError(
            f"{where}: no drafter can be built from the settings that are stated ({_said(error)}). Correct them, or "
            "take the file as it was saved. Nothing was loaded."
        ) from error


def _said(error: Exception) -> str:
    return str(error).partition("\n")[0][:160]


def _extras_of(source: ForeignFormat) -> set[str]:
    """Tensors that a program's files may hold besides the drafter's."""
    return {*source.copies, *(VOCABULARY_MAPS if source.maps_vocabulary else ())}


def _renamed(stored: Mapping[str, torch.Size], mapping: Mapping[str, str], where: str) -> dict[str, torch.Size]:
    """Shapes of a file's tensors by their names here.

    Raises:
        ValueError: two tensors have one name here, so it is open which of them is the drafter's.
    """
    found: dict[str, tuple[str, torch.Size]] = {}
    for name, shape in stored.items():
        begins = (re.sub(there, here, name) for there, here in mapping.items() if re.match(there, name))
        first, _ = found.setdefault(next(begins, name), (name, shape))
        if first != name:
            raise ValueError(
                f"{where}: the weights hold {first} and {name}, which are two spellings of one tensor, so it is open "
                "which one was trained. Remove the other one. Nothing was loaded."
            )
    return {name: shape for name, (_, shape) in found.items()}


def _check_shapes(
    planned: torch.nn.Module, stored: Mapping[str, torch.Size], source: ForeignFormat, where: str
) -> None:
    """Refuse files whose headers show tensors of other shapes than the settings say: before memory is taken for them.

    Raises:
        ValueError: lists all that is wrong with the tensors.
    """
    wanted = {name: value.shape for name, value in planned.state_dict().items()}
    other = [(name, stored[name], shape) for name, shape in wanted.items() if stored.get(name, shape) != shape]
    if other:
        unexpected = stored.keys() - wanted.keys()
        missing = wanted.keys() - stored.keys()
        info = {"missing_keys": missing, "unexpected_keys": unexpected, "mismatched_keys": other}
        _check_loaded(info, _extras_of(source) & unexpected, where)


def _check_loaded(info: Mapping[str, Any], extras: AbstractSet[str], where: str) -> None:
    """Refuse tensors that are missing, unexpected or misshapen, but for ``extras`` and what they will fill."""
    filled = {"draft_vocab"} if "d2t" in extras else set()
    faults = {
        "missing": sorted(_file_name(key) for key in {*info["missing_keys"]} - filled),
        "unexpected": sorted(_file_name(key) for key in {*info["unexpected_keys"]} - extras),
        "of another shape": sorted(f"{_file_name(key)} {a} != {b}" for key, a, b in info["mismatched_keys"]),
    }
    if any(faults.values()):
        stated = "; ".join(f"{kind}: {found}" for kind, found in faults.items() if found)
        raise ValueError(
            f"{where}: the weights are not those of the drafter that {CONFIG_FILE} describes ({stated}). "
            f"{explain_tensors(faults['unexpected'])}"
            "The file belongs to another kind or version of drafter; nothing was loaded."
        )


def _key_mapping(names: Mapping[str, str], source: ForeignFormat) -> dict[str, str]:
    """Patterns of names in the file, and what they become in the model: ``^fc\\.`` becomes ``conditioning.fc.``."""
    parts = {name.split(".")[0]: own[: len(own) - len(name)] for own, name in names.items() if own != name}
    renamed = {there: here for there, here in source.renamed.items() if here.split(".")[0] in parts}
    mapping = {rf"^{re.escape(there)}": f"{parts[here.split('.')[0]]}{here}" for there, here in renamed.items()}
    return mapping | {rf"^{first}\.": f"{part}{first}." for first, part in sorted(parts.items())}


def read_tensors(folder: str | Path, names: Sequence[str], **hub: Any) -> dict[str, Tensor]:
    """Those of the tensors ``names`` that a folder of safetensors has, whichever of its files each is in."""
    found: dict[str, Tensor] = {}
    for file in weight_files(folder, **hub):
        with safe_open(file, "pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in {*names} & {*tensors.keys()}}
    return found


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """transformers' bars off: a drafter is small, and training shows a bar of its own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def without_load_report() -> Iterator[None]:
    """transformers' table of missing and unexpected tensors off."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def write_folder(folder: str | Path, write: Callable[[Path], Any]) -> None:
    """Call ``write`` on an empty folder next to ``folder``, then put it in its place by renaming.

    A reader never finds a folder that is written in part. But a folder cannot be exchanged in one step: between the two
    renames there is none. A process that is killed in between leaves the former one as ``.<folder>.old-<process>``.

    Raises:
        ValueError: a file or a link stands there, which is no folder of ours to replace.
        OSError: it could not be written (no space, no permission); what was there before is untouched.
    """
    final = Path(folder)
    if final.is_symlink() or (final.exists() and not final.is_dir()):
        raise ValueError(f"{final} is a file or a link, and no folder to be replaced. Choose another folder.")
    new, old = (final.parent / f".{final.name}.{kind}-{os.getpid()}" for kind in ("new", "old"))
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        new.mkdir()
        write(new)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)
        raise OSError(
            f"The drafter could not be written to {final} ({error}). What was there before is unchanged. "
            "Free some disk space or choose another folder."
        ) from error
    if final.exists():
        final.rename(old)
    new.rename(final)
    shutil.rmtree(old, ignore_errors=True)
