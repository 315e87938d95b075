"""What training will hold, said before it starts."""

from __future__ import annotations

import torch

from dflash_lightning.model.memory import memory_line
from dflash_lightning.types import FeatureSpec


def test_every_part_is_counted_in_its_own_bytes(make_target, make_draft) -> None:
    target = make_target("llama", hidden_size=1024, intermediate_size=4096, tie_word_embeddings=True)
    target.model.to(torch.bfloat16)
    draft = make_draft(target)
    weights = sum({p.data_ptr(): p.nbytes for p in target.model.parameters()}.values())  # tied ones once
    numbers = sum(p.numel() for p in draft.parameters())
    line = memory_line(target, draft, FeatureSpec((0, 2), last_hidden=True), batch_tokens=16384)
    parts = {
        "target": weights,
        "drafter with gradients and optimizer": 16 * numbers,
        "features of a batch": 16384 * 3 * 1024 * 2,
        "logits": 56 * 2**20,
    }
    for name, count in parts.items():
        assert f"{name} {count / 2**20:.0f} MiB" in line
    assert f"memory: {sum(parts.values()) / 2**20:.0f} MiB and activations" in line


def test_large_parts_are_in_gib(tiny_target, make_draft) -> None:
    line = memory_line(tiny_target, make_draft(tiny_target), FeatureSpec((0, 2)), batch_tokens=2**24)
    assert "features of a batch 4.0 GiB" in line and "target 1 MiB" in line
