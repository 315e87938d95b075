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


def stored_shapes(folder: str | Path, **hub: Any) -> dict[str, torch.Size]:
    """Shapes of all tensors of a folder or repository by name, from the files' headers; empty without safetensors.

    Files whose tensors are codes (int8, fp8 and the like) are refused: a loader would cast them and draft with them.

    Raises:
        ValueError: lists tensors that are codes; a file of several is missing.
        SafetensorError: a file is damaged.
    """
    codes, shapes = {}, {}
    for file in weight_files(folder, **hub):
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (no mapping)
                part = stored.get_slice(name)
                kind, shapes[name] = str(part.get_dtype()), torch.Size(part.get_shape())
                if name not in IDS and kind not in _NUMBERS:
                    codes[name] = kind
    _refuse_codes(codes or _codes_of_pickle(folder, **hub), str(folder))
    return shapes


def _codes_of_pickle(folder: str | Path, **hub: Any) -> dict[str, str]:
    """The same of a folder whose weights are in torch's own format; what cannot be read is left to the loader."""
    quiet = {"_raise_exceptions_for_missing_entries": False, **hub}
    if weight_files(folder, **hub) or (file := cached_file(str(folder), "pytorch_model.bin", **quiet)) is None:
        return {}
    try:
        state = torch.load(str(file), map_location="meta", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError):
        return {}
    return {name: str(v.dtype).removeprefix("torch.") for name, v in state.items() if is_code(name, v)}


def weight_files(folder: str | Path, **hub: Any) -> list[str]:
    """The safetensors files of a folder or repository that a loader reads; none where weights are kept otherwise.

    A single file goes before an index, as transformers has it.

    Raises:
        ValueError: the index is damaged, or names a file that is not there.
    """
    quiet = {"_raise_exceptions_for_missing_entries": False, **hub}
    if (single := cached_file(str(folder), "model.safetensors", **quiet)) is not None:
        return [str(single)]
    if (index := cached_file(str(folder), "model.safetensors.index.json", **quiet)) is None:
        return []
    try:
        names = sorted({*json.loads(Path(str(index)).read_text(encoding="utf-8"))["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of weights ({error!r}). Copy or export the folder again.") from error
    found = {name: cached_file(str(folder), str(name), **quiet) for name in names}
    if missing := [str(name) for name, file in found.items() if file is None]:
        raise ValueError(
            f"{folder}: its index names {_listed(missing)}, which is not there. Copy the rest of its weights too. "
            "Nothing was loaded."
        )
    return [str(file) for file in found.values()]


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
