"""What training will hold, said before it starts."""

from __future__ import annotations

import torch

from dflash_lightning.model.memory import step_memory
from dflash_lightning.types import FeatureSpec


def test_every_part_is_counted_in_its_own_bytes(make_target, make_draft) -> None:
    target = make_target("llama", hidden_size=1024, intermediate_size=4096, tie_word_embeddings=True)
    target.model.to(torch.bfloat16)
    draft = make_draft(target)
    weights = sum({p.data_ptr(): p.nbytes for p in target.model.parameters()}.values())  # tied ones once
    numbers = sum(p.numel() for p in draft.parameters())
    found = step_memory(target, draft, FeatureSpec((0, 2), last_hidden=True), tokens=16384, blocks=512)
    assert found.parts["target"] == weights and found.parts["drafter"] == 4 * numbers
    assert found.parts["gradients and optimizer"] == 12 * numbers
    assert found.parts["features"] == 16384 * 3 * 1024 * 2
    assert all(f"{name} " in found.line() for name in found.parts)
    more = step_memory(target, draft, FeatureSpec((0, 2), last_hidden=True), tokens=16384, blocks=1024)
    assert more.parts["activations"] > 1.5 * found.parts["activations"] > 0
    again = step_memory(target, draft, FeatureSpec((0, 2)), tokens=16384, blocks=512, checkpointed=True)
    assert again.parts["activations"] < 0.8 * found.parts["activations"]
    draft.requires_grad_(False)
    frozen = step_memory(target, draft, FeatureSpec((0, 2)), tokens=16384, blocks=512)
    assert frozen.parts["gradients and optimizer"] == 0 and frozen.parts["logits"] < found.parts["logits"]


def test_large_parts_are_in_gib(tiny_target, make_draft) -> None:
    line = step_memory(tiny_target, make_draft(tiny_target), FeatureSpec((0, 2)), tokens=2**24, blocks=1).line()
    assert "features 4.0 GiB" in line and "target 1 MiB" in line
