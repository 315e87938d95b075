"""Checks that the weights of a drafter are finite floating point numbers, and not the codes of a quantised file."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file

from dflash_lightning.draft_config import NESTED

IDS = ("draft_vocab", "d2t", "t2d")  # tensors of token ids and marks, which are whole numbers
_BLOCKS = ("quantization_config", "compression_config", "quantization")
_NUMBERS = ("F64", "F32", "F16", "BF16")
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_ADVICE = "Quantised drafters are not read. Give the one that it was made from; nothing was loaded."


def check_unquantised(raw: Mapping[str, Any], where: str) -> None:
    """Refuse settings that say that the weights are codes, in whichever block they stand.

    Raises:
        ValueError: names the setting and the method.
    """
    for place in ("", NESTED, "transformer_layer_config"):
        block = (raw.get(place) if place else raw) or {}
        for key in _BLOCKS:
            if block.get(key):
                stated = block[key]
                method = stated.get("quant_method", stated.get("format")) if isinstance(stated, Mapping) else stated
                raise ValueError(
                    f"{where}: config.json states {f'{place}.' if place else ''}{key} (method {method!r}), so its "
                    f"weights are codes and no numbers. {_ADVICE}"
                )


def check_stored(folder: str | Path, **hub: Any) -> None:
    """Refuse files whose tensors are codes (int8, fp8 and the like), from their headers alone.

    A loader would cast the codes to floating point and draft with them.

    Raises:
        ValueError: lists the tensors.
        SafetensorError: a file is damaged.
    """
    codes = {}
    for file in _weight_files(folder, **hub):
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (no mapping)
                kind = str(stored.get_slice(name).get_dtype())
                if name not in IDS and kind not in _NUMBERS:
                    codes[name] = kind
    _refuse_codes(codes or _codes_of_pickle(folder, **hub), str(folder))


def _codes_of_pickle(folder: str | Path, **hub: Any) -> dict[str, str]:
    """The same of a folder whose weights are in torch's own format; what cannot be read is left to the loader."""
    quiet = {"_raise_exceptions_for_missing_entries": False, **hub}
    if _weight_files(folder, **hub) or (file := cached_file(str(folder), "pytorch_model.bin", **quiet)) is None:
        return {}
    try:
        state = torch.load(str(file), map_location="meta", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError):
        return {}
    return {name: str(v.dtype).removeprefix("torch.") for name, v in state.items() if is_code(name, v)}


def _weight_files(folder: str | Path, **hub: Any) -> list[str]:
    """The safetensors files of a folder or repository; none where the weights are kept otherwise.

    Raises:
        ValueError: the index is damaged.
    """
    quiet = {"_raise_exceptions_for_missing_entries": False, **hub}
    index = cached_file(str(folder), "model.safetensors.index.json", **quiet)
    names = ["model.safetensors"]
    if index is not None:
        try:
            names = sorted({*json.loads(Path(str(index)).read_text(encoding="utf-8"))["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is no index of weights ({error!r}). Copy or export the folder again.") from error
    found = (cached_file(str(folder), name, **quiet) for name in names)
    return [str(file) for file in found if file is not None]


def check_tensors(state: Mapping[str, Tensor], where: str) -> None:
    """Refuse codes, and values that are NaN or infinite: every draft would be one token, and nothing would say why.

    Raises:
        ValueError: lists the tensors.
    """
    _refuse_codes({k: str(v.dtype).removeprefix("torch.") for k, v in state.items() if is_code(k, v)}, where)
    if broken := not_finite(state):
        raise ValueError(
            f"{where}: {len(broken)} of its {len(state)} tensors hold NaN or infinity ({_listed(broken)}). The run "
            "that made it diverged, or the file is damaged. Give an earlier checkpoint of it (checkpoints/best.ckpt "
            "follows the best evaluation), or train it again."
        )


def is_code(name: str, value: Tensor) -> bool:
    """Whether a tensor of any shape holds whole numbers, or floats of 8 bits and less, in place of weights."""
    return name not in IDS and value.dtype not in _FLOATS


def not_finite(state: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors with a NaN or an infinity."""
    return [name for name, v in state.items() if v.dtype in _FLOATS and not bool(torch.isfinite(v).all())]


def _refuse_codes(codes: Mapping[str, str], where: str) -> None:
    if codes:
        raise ValueError(
            f"{where}: {len(codes)} tensors hold no plain numbers but {' and '.join(sorted({*codes.values()}))} "
            f"({_listed(sorted(codes))}): codes of a quantised file. {_ADVICE}"
        )


def _listed(names: list[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
