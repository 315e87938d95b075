"""The machine that a speed was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from dflash_lightning.device import gpu_name, num_gpus


def machine() -> dict[str, Any]:
    """What a speed was measured on: processor, threads and, where CUDA is usable, the GPU."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu_name(),
        "gpus": num_gpus(),
    }


def _cpu_name() -> str:
    """As the operating system calls it; Linux knows only the architecture, so its list of processors is read."""
    listed = Path("/proc/cpuinfo")
    for line in listed.read_text(encoding="utf-8").splitlines() if listed.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
