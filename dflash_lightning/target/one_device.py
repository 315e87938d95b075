"""A target lies on one device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dflash_lightning.errors import SettingError


def check_one_device(devices: Iterable[Any]) -> None:
    """Refuse a model in parts.

    Features, embedding and head meet in one step of training and in one round of decoding, and copies of the decoder
    (cut for features, packed for decoding) would not move their inputs as accelerate's hooks on the original do.

    Raises:
        ValueError: there is more than one device; "disk" and "meta" (offloaded weights) count as devices.
    """
    names = sorted({f"cuda:{device}" if str(device).isdigit() else str(device) for device in devices})
    if len(names) > 1:
        raise SettingError(
            "target.device_map",
            f"it spreads the target over {', '.join(names)}, but features, embedding and language head are needed "
            "on one device",
            do="Name one (target.device_map={'': 0}, or target.device=cuda), load a smaller dtype "
            "(target.dtype=bfloat16) or quantised layers (target.quantization), cut it over ranks "
            "(target.tensor_parallel), or choose a smaller target",
        )
