"""Loading a target by path, hub id, GGUF file or a file inside an installed Python package."""

from __future__ import annotations

import json
import struct
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig

from dflash_lightning.device import abilities
from dflash_lightning.errors import SettingError
from dflash_lightning.ops.cpu_speed import bfloat16_is_slow
from dflash_lightning.target.bars import patient_bars
from dflash_lightning.target.checkpoint import load_model
from dflash_lightning.target.checkpoint_files import check_config, check_files, check_packages
from dflash_lightning.target.decode_check import check_decoding
from dflash_lightning.target.facts import find_stop_ids, max_positions, warn_of_limit
from dflash_lightning.target.families import check_family, check_structure
from dflash_lightning.target.frozen import FrozenTarget
from dflash_lightning.target.gguf import cached_folder, check_gguf_extra, dequantise, forget, is_complete, read
from dflash_lightning.target.hub import reachable
from dflash_lightning.target.one_device import check_one_device
from dflash_lightning.target.outline import folder_or_hub, load_outline
from dflash_lightning.target.place import TargetLocation, locate
from dflash_lightning.target.quantization import place_for
from dflash_lightning.target.spread import Spread
from dflash_lightning.target.text import TargetText

DTYPES = ("float32", "bfloat16", "float16", "auto")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_TOKENIZER_JSON = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
)
_GENERATION = "generation_config.json"


def load_target(
    source: str,  # a folder, a hub id, a GGUF file or package://NAME/FILE
    *,
    revision: str | None = None,  # branch, tag or commit on the hub; null: the newest
    dtype: str = "float32",  # float32, bfloat16, float16, or auto: the checkpoint's own
    device: str | torch.device = "cpu",  # where the weights go
    device_map: str | dict[str, Any] | None = None,  # chooses the device instead; one device only
    tensor_parallel: bool = False,  # cut the target over all ranks of the run, which torchrun has started
    quantization: str | None = None,  # quantise its layers on loading: bitsandbytes_4bit or _8bit, torchao_int8
    attn_implementation: str | None = None,  # null: the family's default
    trust_remote_code: bool = False,  # run model code from the hub
    layers: bool | None = None,  # false reads embedding, final norm and head alone; null: all, unless servers have them
) -> FrozenTarget:
    """The causal LM at ``source`` with its tokenizer, frozen.

    ``source`` is a folder, a hub id, a GGUF file (local, or ``owner/repo/file.gguf`` on the hub) or
    ``package://<python package>/<file.gguf>``. ``attn_implementation`` null is the family's default: sdpa where it has
    that, else eager (Gemma 2, GPT-OSS). ``device_map`` replaces ``device``; it may name or choose one device only.
    ``dtype`` "auto" is the checkpoint's own. With ``tensor_parallel`` each rank holds its share of the layers on its
    own device (``target.parallel``), and all of them call this together. With ``quantization`` the layers are
    quantised (``target.quantization``), and the target is another one than without. ``layers`` false reads embedding,
    final norm and language head alone, for runs whose features come from servers (a recipe's null means that, where
    they do); null reads all.

    Raises:
        ValueError: nothing is there, an optional package is missing, ``device_map`` means several devices, the target
            cannot be cut over ranks or quantised here, the family cannot work (found from the configuration, before
            weights are loaded), a file is damaged, the weights are not those that the configuration describes, or the
            start-up self-check fails.
    """
    if dtype not in DTYPES:
        raise SettingError("target.dtype", f"{dtype!r} is unknown", allowed=f"Use one of {list(DTYPES)}")
    if isinstance(device_map, dict):
        check_one_device(device_map.values())
    spread = Spread(tensor_parallel, quantization)
    spread.check(device_map, layers)
    where = reachable(locate(source), revision)
    keywords: dict[str, Any] = {"dtype": "auto" if dtype == "auto" else getattr(torch, dtype)}
    if attn_implementation is not None:
        keywords["attn_implementation"] = attn_implementation
    if device_map is not None:
        keywords["device_map"] = device_map
    remote = {"revision": revision, "trust_remote_code": trust_remote_code}
    if quantization is not None and device_map is None:
        keywords["device_map"] = device_map = place_for(quantization, device)
    with patient_bars(f"loading {source}"):
        if layers is False:
            model, tokenizer = _load_outline(where, remote, keywords["dtype"])
        elif where.gguf_file:
            model, tokenizer = _load_gguf(where, keywords, spread)
        else:
            model, tokenizer = _load_folder(where, remote, keywords, spread)
        if device_map is None and not tensor_parallel:
            model.to(device)
        target = FrozenTarget(model, tokenizer, name=source, revision=revision)
        warn_of_limit(model.config, source)
        if target.has_layers:
            _warn_of_slow_dtype(target)
            target.check()
            check_decoding(target)
    return target


def _load_outline(where: TargetLocation, remote: dict[str, Any], dtype: Any) -> tuple[Any, Any]:
    """Model without decoder layers, and tokenizer."""
    if where.gguf_file:
        check_gguf_extra(where.name)
        kept = _kept_copy(where)
        if kept is None:
            do = "Set target.layers=true, which reads all of it"
            raise SettingError("target.layers", f"{where.name} cannot be read in part, as no copy can be kept", do=do)
        where, remote = kept, {"revision": None}
    config = _read_config(where, remote)
    check_family(config, where.name)
    find = folder_or_hub(where.location, remote["revision"])
    generation = _read_generation(where, {"revision": remote["revision"]})
    tokenizer = _read_tokenizer(where, remote)
    return load_outline(find, config, where.name, dtype=dtype, generation=generation), tokenizer


def _warn_of_slow_dtype(target: FrozenTarget) -> None:
    if abilities(target.device).own_kernels and target.dtype == torch.bfloat16 and bfloat16_is_slow():
        warnings.warn(
            "target.dtype: this CPU has no arithmetic for bfloat16 and imitates it, many times slower than float32. "
            "Use float32 (target.dtype=float32, --dtype float32), which takes twice the memory.",
            stacklevel=3,
        )


def load_text(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> TargetText:
    """Tokenizer and sizes of the target at ``source`` (see ``load_target``), without its weights.

    A GGUF file is dequantised the first time, as ``load_target`` does.

    Raises:
        ValueError: nothing is there, an optional package is missing, or the family cannot be a target.
    """
    where, remote = reachable(locate(source), revision), {"revision": revision, "trust_remote_code": trust_remote_code}
    if where.gguf_file:
        check_gguf_extra(where.name)
        kept = _kept_copy(where)
        where, remote = (_local(where), {"gguf_file": where.gguf_file}) if kept is None else (kept, {})
    config = _read_config(where, remote)
    check_family(config, where.name)
    warn_of_limit(config, source)
    tokenizer = _read_tokenizer(where, remote)
    generation = _read_generation(where, {key: remote[key] for key in ("revision",) if key in remote})
    stop_ids = find_stop_ids(config, generation, tokenizer, name=source)
    return TargetText(source, tokenizer, stop_ids, config.vocab_size, max_positions(config))


def _read_generation(where: TargetLocation, remote: dict[str, Any]) -> GenerationConfig | None:
    """The target's generation config; null where it has none, as for most GGUF files."""
    try:
        return GenerationConfig.from_pretrained(where.location, **remote)
    except OSError:
        return None


def _read_tokenizer(where: TargetLocation, remote: dict[str, Any]) -> Any:
    """The target's tokenizer, null where a folder has none.

    Raises:
        ValueError: one of its files cannot be read; says which.
    """
    if not _has_tokenizer(where):
        return None
    try:
        return AutoTokenizer.from_pretrained(where.location, **remote)
    except Exception as error:  # tokenizers raises plain Exception
        if where.gguf_file is None:
            for name in _TOKENIZER_JSON:
                check_json(Path(where.location) / name)
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise SettingError(
            "target",
            f"the tokenizer of {where.name} cannot be loaded ({type(error).__name__}: {reason})",
            do="Copy or download its files again, or install the package that is named",
        ) from error


def check_json(file: Path) -> None:
    """Refuse a file that is there and no JSON: libraries report a line and a column, but not of which file.

    Raises:
        ValueError: names the file.
    """
    if not file.is_file():
        return
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingError(
            "target",
            f"{file} cannot be read as JSON ({error}): cut short, or a git-lfs pointer",
            do="Copy or download it again",
        ) from error


def _has_tokenizer(where: TargetLocation) -> bool:
    """A local folder may hold a model alone: pretokenised data need no tokenizer."""
    folder = Path(where.location)
    return where.gguf_file is not None or not folder.is_dir() or any((folder / f).exists() for f in _TOKENIZER_FILES)


def _load_folder(
    where: TargetLocation, remote: dict[str, Any], keywords: dict[str, Any], spread: Spread
) -> tuple[Any, Any]:
    """Model and tokenizer of a local folder or hub repository."""
    config = _read_config(where, remote)
    check_family(config, where.name)
    check_packages(config, where.name)
    if (folder := Path(where.location)).is_dir():
        check_files(folder, config, where.name)
        _warn_of_broken_generation(folder)
    check_structure(config, where.name)
    tokenizer = _read_tokenizer(where, remote)  # cheap, and a fault in it is said before the weights are read
    keywords = {**keywords, **spread.keywords(config, where.name, keywords["dtype"])}
    load = partial(AutoModelForCausalLM.from_pretrained, where.location, config=config, **remote, **keywords)
    try:
        return load_model(load, config, where.name), tokenizer
    except ValueError:
        if (fetched := _fetched_folder(where, remote)) is not None:
            check_files(fetched, config, where.name)  # names the file at fault, if it is a file
        raise


def _fetched_folder(where: TargetLocation, remote: dict[str, Any]) -> Path | None:
    """Where the files of a hub repository lie on this machine; null for a local folder."""
    if Path(where.location).is_dir():
        return None
    found = try_to_load_from_cache(where.location, "config.json", revision=remote.get("revision"))
    return Path(found).parent if isinstance(found, str) else None


def _warn_of_broken_generation(folder: Path) -> None:
    """transformers goes on without a generation config that it cannot read, and so without its stop tokens."""
    try:
        check_json(folder / _GENERATION)
    except ValueError as error:
        warnings.warn(f"{error} Its stop tokens are not known.", stacklevel=4)


def _load_gguf(where: TargetLocation, keywords: dict[str, Any], spread: Spread) -> tuple[Any, Any]:
    """Model and tokenizer of a GGUF file, by way of the dequantised copy where that can be kept."""
    check_gguf_extra(where.name)
    kept = _kept_copy(where)
    if kept is not None:
        return _load_folder(kept, {}, keywords, spread)
    if spread.wanted:
        raise SettingError(
            spread.wanted,
            f"{where.name} could not be kept unpacked, which comes before",
            do="Make room for the copy, or leave it out",
        )
    file = where.local_file()
    return read(file, _read_config(_local(where), {"gguf_file": file.name}), **keywords)


def _kept_copy(where: TargetLocation) -> TargetLocation | None:
    """The dequantised copy of a GGUF file, made now if it is not there; null where it cannot be kept."""
    file = where.local_file()
    folder = cached_folder(file)
    if is_complete(folder) and not _is_damaged(folder, where.name):
        return TargetLocation(where.name, str(folder))
    with patient_bars(f"reading {where.name}, once: it is kept unpacked in {folder.parent}"):
        config = _read_config(_local(where), {"gguf_file": file.name})
        check_family(config, where.name)
        check_structure(config, where.name)
        return TargetLocation(where.name, str(folder)) if dequantise(file, config, folder) else None


def _is_damaged(folder: Path, name: str) -> bool:
    """Whether the copy cannot be read; then a warning says so, and it no longer counts as complete."""
    try:
        check_files(folder, PretrainedConfig(), name)
        for file in ("config.json", "tokenizer_config.json"):
            check_json(folder / file)
        if not (folder / "tokenizer.json").read_bytes().rstrip().endswith(b"}"):  # too long to be parsed twice
            raise SettingError("target", f"{folder / 'tokenizer.json'} is cut short")
    except (OSError, ValueError) as error:
        warnings.warn(f"{error} It is the copy that is kept of {name}, and is made again.", stacklevel=2)
        forget(folder)
        return True
    return False


def _local(where: TargetLocation) -> TargetLocation:
    file = where.local_file()
    return TargetLocation(where.name, str(file.parent), file.name)


def _read_config(where: TargetLocation, keywords: dict[str, Any]) -> Any:
    try:
        config = AutoConfig.from_pretrained(where.location, **keywords)
    except (OSError, ValueError, LookupError, TypeError, struct.error, StrictDataclassError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if "gguf_file" in keywords:
            fault = f"{where.name} cannot be read as a GGUF file ({reason}): cut short or damaged. Copy it again."
        elif (Path(where.location) / "adapter_config.json").is_file():
            fault = (
                f"{where.name} holds an adapter and no model. Load it with PEFT, call merge_and_unload(), save the "
                "result with its tokenizer, and give that folder."
            )
        elif "trust_remote_code" in str(error):
            fault = (
                f"{where.name} brings model code of its own, which is not run unasked. Read that code; where you trust "
                "it, set target.trust_remote_code=true (a target option with that line, where a command takes one)."
            )
        elif isinstance(error, (OSError, ValueError)):
            fault = (
                f"no model could be read at {where.name}: {str(error).splitlines()[0]} Give a folder with a "
                "config.json, a GGUF file, or a hub id that this machine can reach."
            )
        else:
            fault = f"config.json of {where.name} cannot be used ({type(error).__name__}: {reason}). Correct it."
        raise SettingError("target", fault) from error
    check_config(config, where.name)
    return config
