"""Quantising a target's layers while it is loaded, where a whole one does not fit.

Embedding and language head stay as they are: drafters need their rows. What is trained, decoded and verified with is
the quantised target, whose digest is another than the plain one's.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PretrainedConfig, TorchAoConfig

from dflash_lightning.device import abilities, gpu_of_rank, has_gpu
from dflash_lightning.errors import SettingError
from dflash_lightning.target.families import setting

_SETTING = "target.quantization"
_PACKAGES = {
    "bitsandbytes_4bit": ("bitsandbytes", "accelerate"),
    "bitsandbytes_8bit": ("bitsandbytes", "accelerate"),
    "torchao_int8": ("torchao",),
}
QUANTIZATIONS = tuple(_PACKAGES)


def check_quantization(kind: str) -> None:
    """Refuse what is unknown, and what this machine lacks the packages or the GPU for; nothing is read.

    Raises:
        ValueError: says which.
    """
    if kind not in _PACKAGES:
        raise SettingError(
            _SETTING,
            f"{kind!r} is unknown",
            allowed=f"Use one of {', '.join(QUANTIZATIONS)}, or null",
            do="A checkpoint that is quantised already (compressed-tensors, AWQ, ..) needs no setting",
        )
    if missing := [package for package in _PACKAGES[kind] if find_spec(package) is None]:
        raise SettingError(
            _SETTING, f"{kind} needs {' and '.join(missing)}", do=f"Run: pip install {' '.join(missing)}"
        )
    if _on_gpu_only(kind) and not has_gpu():
        raise SettingError(_SETTING, f"{kind} needs a CUDA GPU, and there is none", do="Use torchao_int8, or null")


def place_for(kind: str, device: torch.device | str) -> dict[str, str]:
    """Where the layers are quantised: on ``device``, but never on the CPU by what computes on GPUs only."""
    on_cpu = not abilities(torch.device(device)).queues
    return {"": gpu_of_rank() if on_cpu and _on_gpu_only(kind) else str(device)}


def _on_gpu_only(kind: str) -> bool:
    return kind.startswith("bitsandbytes")


def quantising(kind: str, config: PretrainedConfig, name: str, dtype: torch.dtype | str) -> dict[str, Any]:
    """What says to ``from_pretrained`` how to quantise.

    Raises:
        ValueError: the checkpoint is quantised already.
    """
    if (own := setting(config, "quantization_config")) is not None:
        method = own.get("quant_method") if isinstance(own, dict) else own.quant_method
        raise SettingError(_SETTING, f"{name} is quantised already ({method})", do="Set it to null")
    return {"quantization_config": _settings(kind, dtype)}


def _settings(kind: str, dtype: torch.dtype | str) -> Any:
    if kind == "bitsandbytes_8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    if kind == "bitsandbytes_4bit":
        compute = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
    return TorchAoConfig(_int8())


def _int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig  # an optional package

    return Int8WeightOnlyConfig()
