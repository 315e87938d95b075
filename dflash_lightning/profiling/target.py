"""The target's pass for features, measured, beside the full forward pass that would keep every layer's output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dflash_lightning.profiling.build import Place, build_prompts, build_target
from dflash_lightning.profiling.figures import Figures, median, timed
from dflash_lightning.profiling.peak_memory import MemoryWatch
from dflash_lightning.profiling.product_rate import product_seconds
from dflash_lightning.profiling.shape import Shape
from dflash_lightning.profiling.stages import StageTimes, before
from dflash_lightning.profiling.work import target_pass
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import FeatureSpec

_STAGES = ("attention", "mlp", "rest")


def measure_target(shape: Shape, place: Place, *, repeats: int) -> Figures:
    """``repeats`` passes over ``batch`` rows for the layers that the drafter reads, then one that is watched."""
    target = build_target(shape, place)
    ids = torch.tensor(build_prompts(shape), device=place.device)
    positions = torch.arange(shape.sequence, device=place.device).expand_as(ids)
    spec = FeatureSpec(tuple(shape.layer_ids))

    def read() -> None:
        target.features(ids, positions, spec, packed=False)

    def full() -> None:
        with torch.inference_mode():
            target.model.base_model(ids, use_cache=False, output_hidden_states=True)

    target.features(ids[:, :8], positions[:, :8], spec, packed=False)  # libraries load what they use first
    memory = MemoryWatch(target.device)
    whole = [timed(read) for _ in range(repeats + 1)]
    peak = memory.peak()
    memory = MemoryWatch(target.device)
    others = [timed(full) for _ in range(repeats + 1)]
    full_peak = memory.peak()
    times = StageTimes(_STAGES)
    with _watching(target, times):
        times.switch("rest")
        read()
        times.switch(None)
    rows = shape.batch * shape.sequence
    work = target_pass(shape, rows=rows, num_layers=max(shape.layer_ids) + 1, seen=rows * shape.sequence, stage=None)
    return Figures(
        what="target",
        unit="pass",
        shape=shape,
        place=place,
        spent=median(whole[1:]),
        stages=times.spent,
        flop=work.by_stage(),
        product_seconds=product_seconds(work, place),
        memory=peak.figures(),
        rates={
            "full_forward_cpu_seconds": median(others[1:]).cpu,
            "full_forward_wall_seconds": median(others[1:]).wall,
            "full_forward_growth_mib": full_peak.growth / 2**20,
        },
    )


@contextmanager
def _watching(target: FrozenTarget, times: StageTimes) -> Iterator[None]:
    """Attention with the norm before it, and the feed-forward part with its own, of a Llama's layers."""
    hooks = []
    for layer in target.anatomy.layers:
        parts: Any = layer
        hooks += [
            before(parts.input_layernorm, times, "attention"),
            before(parts.post_attention_layernorm, times, "mlp"),
        ]
    norm = target.anatomy.decoder.get_submodule(target.anatomy.norm_name)
    hooks.append(before(norm, times, "rest"))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
