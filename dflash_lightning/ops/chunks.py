"""How many rows of logits exist at a time."""

from __future__ import annotations

import torch

from dflash_lightning.device import abilities

# Bytes of fp32 logits that exist at a time. On a GPU that is 440 rows of a vocabulary of 152 000, which keep it busy (a
# gradient is as large again). On a CPU, glibc gives blocks above 32 MiB back to the system at every free, and the page
# faults of getting them again cost a fifth of the pass.
CHUNK_BYTES = 256 * 2**20
CPU_CHUNK_BYTES = 28 * 2**20


def chunk_bytes(device: torch.device) -> int:
    """Bytes of logits that exist at a time on ``device``."""
    return CPU_CHUNK_BYTES if abilities(device).own_kernels else CHUNK_BYTES


def cut(num_rows: int, largest: int) -> list[slice]:
    """Runs of ``num_rows`` rows of about equal length, none longer than ``largest``."""
    pieces = -(-num_rows // largest)
    step = max(1, -(-num_rows // max(1, pieces)))
    return [slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step)]
