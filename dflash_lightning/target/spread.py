"""What is done, on loading, to a target that is too large for a device as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from dflash_lightning.errors import SettingError
from dflash_lightning.target.parallel import cutting
from dflash_lightning.target.quantization import check_quantization, quantising


@dataclass(frozen=True)
class Spread:
    """``target.tensor_parallel`` and ``target.quantization``; see ``load_target``."""

    tensor_parallel: bool = False
    quantization: str | None = None

    @property
    def wanted(self) -> str:
        """The setting that asks for something; empty if none does."""
        return "target.tensor_parallel" * self.tensor_parallel or "target.quantization" * bool(self.quantization)

    def check(self, device_map: Any, layers: bool | None) -> None:
        """Refuse what does not go together, and what this machine cannot do; nothing is read.

        Raises:
            ValueError: names the setting.
        """
        if self.quantization is not None:
            check_quantization(self.quantization)
        if self.tensor_parallel and device_map is not None:
            raise SettingError(
                "target.device_map", f"{device_map!r} does not go with tensor_parallel", "Set it to null"
            )
        if self.tensor_parallel and self.quantization is not None:
            what = f"{self.quantization} does not go with tensor_parallel"
            raise SettingError("target.quantization", what, "Set it to null")
        if self.wanted and layers is False:
            what = "it concerns the target's layers, which are not read"
            raise SettingError(self.wanted, what, "Leave it out where features come from servers")

    def keywords(self, config: PretrainedConfig, name: str, dtype: torch.dtype | str) -> dict[str, Any]:
        """What ``from_pretrained`` is to be told."""
        if self.tensor_parallel:
            return cutting(config, name)
        return {} if self.quantization is None else quantising(self.quantization, config, name, dtype)
