"""Files of a checkpoint folder, looked at before any weight is loaded: whole, readable, and what their index says."""

from __future__ import annotations

import json
import re
import zipfile
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from dflash_lightning.errors import SettingError
from dflash_lightning.target.families import POSITIONS, setting

_LFS = b"version https://git-lfs"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_ADAPTER = "adapter_config.json"
_AGAIN = "Copy or download it again."
_NAMED = 6  # tensors that an error names
_NUMBERS = {"F64", "F32", "F16", "BF16"}  # safetensors' names of what weights are stored as
_STORED = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# Packages that transformers reads a quantised checkpoint with, by ``quant_method``.
_PACKAGES = {
    "aqlm": ("accelerate", "aqlm"),
    "auto-round": ("auto-round",),
    "awq": ("accelerate", "gptqmodel"),
    "bitnet": ("accelerate",),
    "bitsandbytes": ("accelerate", "bitsandbytes"),
    "compressed-tensors": ("compressed-tensors",),
    "eetq": ("accelerate", "kernels"),
    "fbgemm_fp8": ("accelerate", "fbgemm-gpu-genai"),
    "fp8": ("accelerate",),
    "fp_quant": ("fp-quant",),
    "gptq": ("optimum", "gptqmodel"),
    "higgs": ("accelerate", "flute-kernel", "fast-hadamard-transform"),
    "hqq": ("hqq",),
    "mxfp4": ("accelerate",),
    "quanto": ("optimum-quanto",),
    "quark": ("amd-quark",),
    "spqr": ("accelerate", "spqr-quant"),
    "torchao": ("torchao",),
    "vptq": ("accelerate", "vptq"),
}
# Tensors that files carry beside the model: old buffers, states of other runtimes, scales of a server's cache.
IGNORED = re.compile(
    r"rotary_emb\.inv_freq$|(^|\.)position_ids$|\.(attn|attention)\.(masked_)?bias$|_extra_state$|\.[kv]_scale$"
    r"|(^|\.)mtp(_\w+)?\."
)


def list_names(names: list[str]) -> str:
    """The first few of ``names``, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def check_config(config: PretrainedConfig, name: str) -> None:
    """Refuse settings of ``config.json`` on which building or using the model would stumble.

    Raises:
        ValueError: the padding token is no row of the embedding, or there is no position.
    """
    for key in POSITIONS:
        if isinstance(positions := setting(config, key), int) and positions < 1:
            raise SettingError(
                "target",
                f"config.json of {name} states {key} {positions}, so no token has a place",
                do="Correct it: the number is the longest text that the model was made for",
            )
    rows, pad = setting(config, "vocab_size"), setting(config, "pad_token_id")
    if isinstance(rows, int) and isinstance(pad, int) and pad >= rows:
        raise SettingError(
            "target",
            f"config.json of {name} names pad_token_id {pad}, but its vocabulary has {rows} rows (0..{rows - 1})",
            do="Correct it, or set it to null",
        )


def check_packages(config: PretrainedConfig, name: str) -> None:
    """Refuse quantised weights for which a package is missing, or which transformers does not know.

    Raises:
        ValueError: names the method and what to install.
    """
    quantised = setting(config, "quantization_config")
    if quantised is None:
        return
    settings: Mapping[str, Any] = quantised if isinstance(quantised, dict) else quantised.to_dict()
    method = str(settings.get("quant_method") or "")
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        method = "bitsandbytes"
    if method not in {*AUTO_QUANTIZER_MAPPING, *_PACKAGES}:
        raise SettingError(
            "target",
            f"{name} is quantised by a method that cannot be read here (quantization_config.quant_method is "
            f"{method!r})",
            do=f"Use the checkpoint that it was made from, or a method of: {', '.join(sorted(_PACKAGES))}",
        )
    if missing := [package for package in _PACKAGES.get(method, ()) if not _is_installed(package)]:
        raise SettingError(
            "target",
            f"{name} is quantised ({method}), and reading it needs {' and '.join(missing)}",
            do=f"Run: pip install {' '.join(missing)} (or use the checkpoint that it was made from)",
        )


def check_files(folder: Path, config: PretrainedConfig, name: str) -> None:
    """Refuse weight files that are cut, empty or pointers, and an index that does not say what they hold.

    Only headers are read. A folder without weights is left to transformers, which says so by itself.

    Raises:
        ValueError: names every file at fault, or an adapter beside the model.
    """
    if (folder / _ADAPTER).is_file():
        raise SettingError(
            "target",
            f"{folder} holds a model and an adapter ({_ADAPTER})",
            do="Whether the adapter is applied depends on the packages installed. Call merge_and_unload() on the "
            "model and save the result, or move the adapter's files out of the folder",
        )
    single = next((folder / file for file in _WEIGHTS if (folder / file).is_file()), None)
    indices = [folder / f"{file}.index.json" for file in _WEIGHTS]
    index = next((file for file in indices if file.is_file()), None) if single is None else None
    if single is None and index is None:
        return
    shards = {} if index is None else _read_index(index)
    files = [single] if single is not None else [folder / file for file in sorted(set(shards.values()))]
    if faults := [f"{file} {fault}" for file in files if file is not None and (fault := _fault(file))]:
        raise SettingError("target", f"weights of {name} cannot be read: {'; '.join(faults)}", do=_AGAIN)
    held = {file.name: _header(file) for file in files if file is not None and file.suffix == ".safetensors"}
    if index is not None and held:
        _check_index(index, shards, held, setting(config, "tie_word_embeddings", default=False))
    if setting(config, "quantization_config") is None:
        pickled = {file.name: _pickled_header(file) for file in files if file is not None and file.name not in held}
        _check_codes({**held, **pickled}, folder)


def _read_index(index: Path) -> dict[str, str]:
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise SettingError("target", f"{index} is no index of weight files ({error})", do=_AGAIN) from error
    if not isinstance(shards, dict) or not shards:
        raise SettingError("target", f"{index} names no weights (its weight_map is empty)", do=_AGAIN)
    if not all(isinstance(file, str) for file in shards.values()):
        raise SettingError("target", f"{index} is no index of weight files (a file in it is no name)", do=_AGAIN)
    return shards


def _fault(file: Path) -> str:
    """What is wrong with a weight file, empty when it can be opened."""
    if not file.is_file():
        return "is not there"
    with file.open("rb") as stream:
        begin = stream.read(len(_LFS))
    if not begin:
        return "is empty"
    if begin == _LFS:
        return "is a git-lfs pointer instead of the weights (run git lfs pull in its folder)"
    if file.suffix != ".safetensors":
        whole = zipfile.is_zipfile(file) if begin.startswith(b"PK") else begin.startswith(b"\x80")
        return "" if whole else "is cut short or no PyTorch file"
    try:
        _header(file)
    except (SafetensorError, OSError) as error:
        return f"is cut short or no safetensors file ({error})"
    return ""


def _header(file: Path) -> dict[str, tuple[str, int]]:
    """dtype and number of dimensions of every tensor in a safetensors file."""
    with safe_open(file, "pt") as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
        return {name: (str(piece.get_dtype()), len(piece.get_shape())) for name, piece in slices.items()}


def _pickled_header(file: Path) -> dict[str, tuple[str, int]]:
    """As ``_header``, of a PyTorch file, whose values are not read; empty where transformers will say what it is."""
    try:
        held = torch.load(file, map_location="meta", weights_only=True)
    except Exception:  # whatever a pickle can raise; loading the model says it once more, and in full
        return {}
    tensors = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
    return {name: (_STORED.get(value.dtype, str(value.dtype)), value.ndim) for name, value in tensors.items()}


def _check_index(index: Path, shards: dict[str, str], held: Mapping[str, Mapping[str, Any]], tied: bool) -> None:
    absent = sorted(name for name, file in shards.items() if name not in held.get(file, {}))
    if absent:
        where = ", ".join(sorted({shards[name] for name in absent}))
        raise SettingError(
            "target",
            f"{index} names tensors that are not in their files ({where}): {list_names(absent)}",
            do="The files are incomplete or of another version. Copy or download the folder again",
        )
    held_names = [name for tensors in held.values() for name in tensors]
    twice = sorted(name for name, count in Counter(held_names).items() if count > 1)
    if twice:
        where = ", ".join(sorted(file for file, tensors in held.items() if not tensors.keys().isdisjoint(twice)))
        raise SettingError(
            "target",
            f"files of {index} hold tensors twice ({where}), and nobody knows which are meant: {list_names(twice)}",
            do="The files are of two versions. Copy or download the folder again",
        )
    unnamed = sorted(set(held_names) - shards.keys())
    unnamed = [name for name in unnamed if not IGNORED.search(name) and not (tied and name.startswith("lm_head."))]
    if unnamed:
        raise SettingError(
            "target",
            f"{index} lacks tensors that its files hold: {list_names(unnamed)}",
            do="Programs that go by the index would leave them out. Copy or download it again, or save the model anew",
        )


def _check_codes(held: Mapping[str, Mapping[str, tuple[str, int]]], folder: Path) -> None:
    """Whatever is no ordinary float is a code that needs scales, or no weight at all: cast, it is nonsense."""
    codes = sorted(
        f"{name} ({dtype})"
        for tensors in held.values()
        for name, (dtype, dimensions) in tensors.items()
        if dtype not in _NUMBERS and (dimensions > 1 or name.endswith("weight")) and not IGNORED.search(name)
    )
    if codes:
        raise SettingError(
            "target",
            f"{folder} holds quantised weights, but its config.json has no quantization_config that says how to "
            f"read them: {list_names(codes)}",
            do="Restore it, or use the checkpoint that it was made from",
        )


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
