"""What training will hold in memory, from what is known before its first step."""

from __future__ import annotations

from dflash_lightning.model import DraftModel
from dflash_lightning.ops.lm_head import chunk_bytes
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import FeatureSpec

# float32 weight, gradient and the two moments of AdamW.
_BYTES_PER_PARAMETER = 16


def memory_line(target: FrozenTarget, draft: DraftModel, spec: FeatureSpec, batch_tokens: int) -> str:
    """One line of text: the memory that a process needs at least, by part. Activations are not counted.

    ``batch_tokens`` are the positions of a micro-batch.
    """
    width = (len(spec.layer_ids) + spec.last_hidden) * target.facts.hidden_size
    parts = {
        "target": sum(p.numel() * p.element_size() for p in target.model.parameters()),
        "drafter with gradients and optimizer": _BYTES_PER_PARAMETER * sum(p.numel() for p in draft.parameters()),
        "features of a batch": batch_tokens * width * target.dtype.itemsize,
        "logits": 2 * chunk_bytes(draft.device),  # a gradient is as large again
    }
    listed = ", ".join(f"{name} {_size(count)}" for name, count in parts.items())
    return f"memory: {_size(sum(parts.values()))} and activations ({listed})"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{max(1, round(count / 2**20))} MiB"
