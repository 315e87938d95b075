"""Loading a target by path, hub id, GGUF file or a file inside an installed Python package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dflash_lightning.target.facts import find_stop_ids, max_positions
from dflash_lightning.target.families import check_family, check_structure
from dflash_lightning.target.frozen import FrozenTarget, check_one_device
from dflash_lightning.target.gguf import cached_folder, check_gguf_extra, dequantise, is_complete, read
from dflash_lightning.target.place import Source, locate
from dflash_lightning.target.text import TargetText

DTYPES = ("float32", "bfloat16", "float16", "auto")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_target(
    source: str,  # a folder, a hub id, a GGUF file or package://NAME/FILE
    *,
    revision: str | None = None,  # branch, tag or commit on the hub; null: the newest
    dtype: str = "float32",  # float32, bfloat16, float16, or auto: the checkpoint's own
    device: str | torch.device = "cpu",  # where the weights go
    device_map: str | dict[str, Any] | None = None,  # chooses the device instead; one device only
    attn_implementation: str | None = None,  # null: the family's default
    trust_remote_code: bool = False,  # run model code from the hub
) -> FrozenTarget:
    """The causal LM at ``source`` with its tokenizer, frozen.

    ``source`` is a folder, a hub id, a GGUF file (local, or ``owner/repo/file.gguf`` on the hub) or
    ``package://<python package>/<file.gguf>``. ``attn_implementation`` null is the family's default: sdpa where it has
    that, else eager (Gemma 2, GPT-OSS). ``device_map`` replaces ``device``; it may name or choose one device only.
    ``dtype`` "auto" is the checkpoint's own.

    Raises:
        ValueError: nothing is there, an optional package is missing, ``device_map`` means several devices, the family
            cannot work (found from the configuration, before weights are loaded), or the start-up self-check fails.
    """
    if dtype not in DTYPES:
        raise ValueError(f"target.dtype: {dtype!r} is unknown. Use one of {list(DTYPES)}.")
    if isinstance(device_map, dict):
        check_one_device(device_map.values())
    where = locate(source)
    keywords: dict[str, Any] = {"dtype": "auto" if dtype == "auto" else getattr(torch, dtype)}
    if attn_implementation is not None:
        keywords["attn_implementation"] = attn_implementation
    if device_map is not None:
        keywords["device_map"] = device_map
    remote = {"revision": revision, "trust_remote_code": trust_remote_code}
    model, tokenizer = _load_gguf(where, keywords) if where.gguf_file else _load_folder(where, remote, keywords)
    if device_map is None:
        model.to(device)
    target = FrozenTarget(model, tokenizer, name=source, revision=revision)
    target.check()
    return target


def load_text(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> TargetText:
    """Tokenizer and sizes of the target at ``source`` (see ``load_target``), without its weights.

    A GGUF file is dequantised the first time, as ``load_target`` does.

    Raises:
        ValueError: nothing is there, an optional package is missing, or the family cannot be a target.
    """
    where, remote = locate(source), {"revision": revision, "trust_remote_code": trust_remote_code}
    if where.gguf_file:
        check_gguf_extra(where.name)
        kept = _kept_copy(where)
        where, remote = (_local(where), {"gguf_file": where.gguf_file}) if kept is None else (kept, {})
    config = _read_config(where, remote)
    check_family(config, where.name)
    tokenizer = AutoTokenizer.from_pretrained(where.location, **remote) if _has_tokenizer(where) else None
    generation = _read_generation(where, {key: remote[key] for key in ("revision",) if key in remote})
    stop_ids = find_stop_ids(config, generation, tokenizer)
    return TargetText(source, tokenizer, stop_ids, config.vocab_size, max_positions(config))


def _read_generation(where: Source, remote: dict[str, Any]) -> GenerationConfig | None:
    """The target's generation config; null where it has none, as for most GGUF files."""
    try:
        return GenerationConfig.from_pretrained(where.location, **remote)
    except OSError:
        return None


def _has_tokenizer(where: Source) -> bool:
    """A local folder may hold a model alone: pretokenised data need no tokenizer."""
    folder = Path(where.location)
    return where.gguf_file is not None or not folder.is_dir() or any((folder / f).exists() for f in _TOKENIZER_FILES)


def _load_folder(where: Source, remote: dict[str, Any], keywords: dict[str, Any]) -> tuple[Any, Any]:
    """Model and tokenizer of a local folder or hub repository."""
    config = _read_config(where, remote)
    check_family(config, where.name)
    check_structure(config, where.name)
    model = AutoModelForCausalLM.from_pretrained(where.location, config=config, **remote, **keywords)
    return model, AutoTokenizer.from_pretrained(where.location, **remote) if _has_tokenizer(where) else None


def _load_gguf(where: Source, keywords: dict[str, Any]) -> tuple[Any, Any]:
    """Model and tokenizer of a GGUF file, by way of the dequantised copy where that can be kept."""
    check_gguf_extra(where.name)
    kept = _kept_copy(where)
    if kept is not None:
        return _load_folder(kept, {}, keywords)
    file = where.local_file()
    return read(file, _read_config(_local(where), {"gguf_file": file.name}), **keywords)


def _kept_copy(where: Source) -> Source | None:
    """The dequantised copy of a GGUF file, made now if it is not there; null where it cannot be kept."""
    file = where.local_file()
    folder = cached_folder(file)
    if not is_complete(folder):
        config = _read_config(_local(where), {"gguf_file": file.name})
        check_family(config, where.name)
        check_structure(config, where.name)
        if not dequantise(file, config, folder):
            return None
    return Source(where.name, str(folder))


def _local(where: Source) -> Source:
    file = where.local_file()
    return Source(where.name, str(file.parent), file.name)


def _read_config(where: Source, keywords: dict[str, Any]) -> Any:
    try:
        return AutoConfig.from_pretrained(where.location, **keywords)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"target: no model could be read at {where.name}: {str(error).splitlines()[0]} Give a folder with a "
            "config.json, a GGUF file, or a hub id that this machine can reach."
        ) from error
