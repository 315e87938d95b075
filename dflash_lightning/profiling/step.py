"""One training step, measured: the target's features, the drafter's forward and backward pass, the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_lightning.loss import total_loss
from dflash_lightning.model.memory import StepMemory, step_memory
from dflash_lightning.module import DraftModule
from dflash_lightning.profiling.build import Place, build_batch, build_module, build_target
from dflash_lightning.profiling.figures import Figures, median, timed
from dflash_lightning.profiling.peak_memory import MemoryWatch
from dflash_lightning.profiling.product_rate import product_seconds
from dflash_lightning.profiling.shape import Shape
from dflash_lightning.profiling.stages import STEP_STAGES, StageTimes, watching
from dflash_lightning.profiling.work import Work, step_work, target_pass
from dflash_lightning.types import StepContext, TrainBatch

# So small that it costs nothing: what libraries load when they are first used is no memory of the shape's.
_WARM = Shape(
    vocab=64, hidden=32, ffn=64, heads=2, kv_heads=1, head_dim=16, target_layers=8, features=2, layers=1,
    sequence=64, block=4, anchors=32,
)  # fmt: skip


@dataclass
class Step:
    """A module with its optimizer and a batch, ready to make steps of."""

    module: DraftModule
    optimizer: torch.optim.Optimizer
    batch: TrainBatch
    place: Place

    @classmethod
    def make(cls, shape: Shape, place: Place) -> Step:
        """For a random target and drafter of this shape."""
        module = build_module(shape, build_target(shape, place))
        parameters = [p for p in module.draft_model.parameters() if p.requires_grad]
        batch = build_batch(shape, module)
        optimizer = module.optim.make_optimizer(parameters, scaled=False)
        return cls(module, optimizer, module.transfer_batch_to_device(batch, module.target.device, 0), place)

    def run(self, times: StageTimes) -> float:
        """One step; returns the loss."""
        module, batch = self.module, self.batch
        times.switch("target")
        batch.features = module.target.features(batch.input_ids, batch.position_ids, module.required(), packed=False)
        times.switch("rest")
        with torch.autocast(self.place.device, dtype=self.place.dtype, enabled=self.place.dtype != torch.float32):
            out, features = module.outputs(batch)
            times.switch("head")
            shares = module.loss_shares(batch, out, features, StepContext(0, 1, 0), batch.window_totals)
            loss = total_loss(shares)
        del out, features
        batch.features = None
        loss.backward()
        times.switch("optimizer")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        times.switch(None)
        return float(loss.detach())

    def work(self, shape: Shape) -> Work:
        """What a step of it has to compute."""
        layout, device = self.batch.layout, self.place.device
        seen = int((layout.context_end - layout.context_start).clamp(min=0)[layout.keep].sum())
        rows = shape.batch * shape.sequence
        deepest = max(shape.layer_ids) + 1
        target = target_pass(shape, rows=rows, num_layers=deepest, seen=rows * shape.sequence)
        return target + step_work(shape, seen=seen, scored=len(layout.rows), device=device)

    def memory(self) -> StepMemory:
        """What the formula expects."""
        batch, module = self.batch, self.module
        half = None if self.place.dtype == torch.float32 else self.place.dtype
        return step_memory(
            module.target,
            module.draft_model,
            module.required(),
            tokens=batch.input_ids.numel(),
            blocks=batch.layout.anchors.numel(),
            autocast=half,
        )


def measure_step(shape: Shape, place: Place, *, repeats: int) -> Figures:
    """``repeats`` steps for the whole, then one more that is watched stage by stage."""
    Step.make(_WARM, place).run(StageTimes(STEP_STAGES))
    step = Step.make(shape, place)
    memory = MemoryWatch(step.module.target.device)
    whole = [timed(lambda: step.run(StageTimes(STEP_STAGES))) for _ in range(repeats + 1)]
    peak = memory.peak()
    times = StageTimes(STEP_STAGES)
    with watching(step.module.draft_model, times):
        step.run(times)
    work = step.work(shape)
    return Figures(
        what="step",
        unit="step",
        shape=shape,
        place=place,
        spent=median(whole[1:]),  # the first one makes the optimizer's state
        stages=times.spent,
        flop=work.by_stage(),
        product_seconds=product_seconds(work, place),
        memory={**peak.figures(), **step.memory().figures()},
    )
