"""Stops a run at the first loss or gradient that is no number, before it reaches the weights or a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn

from dflash_lightning.device import Mark, abilities, mark
from dflash_lightning.errors import SettingError
from dflash_lightning.model import DraftModel
from dflash_lightning.target.parallel import is_cut, whole
from dflash_lightning.training.sharded import ShardedStrategy, local

_SHOWN_DOCUMENTS = 8


class Diverged(RuntimeError):
    """A loss or a gradient is NaN or infinite. The weights are still those of the optimizer step before."""


@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step is judged by; the tensors stay on the device until they are read.

    ``loss`` is that of the whole accumulation window over all ranks, ``norm`` that of all gradients, unclipped.
    ``sample_ids`` name the documents of this rank's micro-batches, -1 is padding.
    """

    number: int
    epoch: int
    lr: float
    loss: Float[Tensor, ""]
    norm: Float[Tensor, ""]
    sample_ids: list[Tensor]
    bad: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bad", ~torch.isfinite(self.loss + self.norm))


class StepGuard:
    """Judges every optimizer step.

    On the CPU at once. On a GPU reading a number makes the program wait for everything before it, so there the fused
    optimizer is told on the device to leave the weights alone, and the number is read one step later, when the next
    forward has been queued: nothing waits. Either way the weights of a bad step are those of the step before. Every
    rank judges the same reduced numbers, so that all stop together.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter], *, late: bool) -> None:
        self.names, self.parameters, self.late = list(names), list(parameters), late
        self._pending: tuple[StepRecord, Tensor, Mark | None] | None = None

    def judge(self, record: StepRecord, optimizer: torch.optim.Optimizer) -> None:
        """Called with the gradients made and the weights not yet changed.

        Raises:
            Diverged: the loss or the gradients' norm is not finite (with ``late``: of the step before).
        """
        self.settle()
        if not self.late:
            if bool(record.bad):
                raise self._error(record)
            return
        optimizer.found_inf = record.bad.float()  # type: ignore[attr-defined]  # its step changes nothing where this is 1
        seen = record.bad.to("cpu", non_blocking=True)
        self._pending = (record, seen, mark(record.bad.device))

    def settle(self) -> None:
        """Read the verdict that is still open, if there is one: before gradients are cleared, and before a save.

        Raises:
            Diverged: it is a bad one.
        """
        if self._pending is None:
            return
        record, seen, event = self._pending
        self._pending = None
        if event is not None:
            event.synchronize()
        if bool(seen):
            raise self._error(record)

    def _error(self, record: StepRecord) -> Diverged:
        broken = [n for n, p in zip(self.names, self.parameters, strict=True) if not torch.isfinite(whole(p)).all()]
        several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        rank = f", rank {torch.distributed.get_rank()}" if several else ""
        lines = [
            f"training stopped at optimizer step {record.number} (epoch {record.epoch}{rank}): the loss is "
            f"{float(record.loss):.4g} and the norm of the gradients {float(record.norm):.4g}. The step was not made.",
            f"  batch              documents {_documents(record.sample_ids)} (numbered from 0, as they are trained on)",
            f"  largest gradient   {self._largest()}",
            f"  learning rate      {record.lr:.3g}",
        ]
        if broken:
            lines.append(
                f"  weights            {len(broken)} of {len(self.names)} parameters were NaN or infinite before this "
                f"step, {broken[0]} first: the step before broke them"
            )
        return Diverged("\n".join([*lines, ADVICE]))

    def _largest(self) -> str:
        sizes = {
            name: float(whole(parameter.grad).detach().float().norm())
            for name, parameter in zip(self.names, self.parameters, strict=True)
            if parameter.grad is not None
        }
        if not sizes:
            return "none was made"
        broken = [name for name, size in sizes.items() if size != size or size == float("inf")]
        name = broken[0] if broken else max(sizes, key=lambda key: sizes[key])
        more = f"; NaN or infinite in {len(broken)} of {len(sizes)} parameters" if broken else ""
        return f"{name} (norm {sizes[name]:.4g}){more}"


ADVICE = """\
  likely causes      a learning rate that is too high, or a warm-up that is too short; a target in float16 whose
                     features overflow; a loss of your own that takes the logarithm of 0 or divides by 0
  what to do         start anew (--fresh) with a lower optim.lr or a longer optim.warmup_fraction; train with
                     trainer.gradient_clip_val=1.0, target.dtype=bfloat16 or float32, trainer.precision=32-true"""


def _documents(sample_ids: list[Tensor]) -> str:
    ids = sorted({int(i) for batch in sample_ids for i in batch.flatten().tolist() if i >= 0})
    more = f" and {len(ids) - _SHOWN_DOCUMENTS} more" if len(ids) > _SHOWN_DOCUMENTS else ""
    return (", ".join(map(str, ids[:_SHOWN_DOCUMENTS])) or "none") + more


class ScaleGuard(StepGuard):
    """For float16, where a scaler tries scales until gradients no longer overflow, and leaves out such steps itself.

    So a gradient may be infinite; a loss may not, and neither may ``PATIENCE`` gradients in a row, by which time the
    scale has been halved as often.
    """

    PATIENCE = 20

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(names, parameters, late=False)
        self.overflows = 0

    def judge(self, record: StepRecord, optimizer: torch.optim.Optimizer) -> None:
        self.overflows = self.overflows + 1 if bool(record.bad) else 0
        if not bool(torch.isfinite(record.loss)) or self.overflows >= self.PATIENCE:
            raise self._error(record)


def make_guard(model: DraftModel, device: torch.device, *, scaled: bool) -> StepGuard:
    """The guard for ``model``; ``scaled`` says that gradients are scaled against underflow (float16)."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if scaled:
        return ScaleGuard(list(named), list(named.values()))
    # Nobody has tried yet whether the fused optimizer of sharded weights can be told on the device.
    late = abilities(device).events and not is_cut(model)
    return StepGuard(list(named), list(named.values()), late=late)


def check_trainer(trainer: Trainer, model: DraftModel) -> None:
    """Refuse a trainer with which ``model`` would train silently worse, or not at all.

    Raises:
        ValueError: its strategy is none that is supported, or its precision does not keep parameters in float32.
    """
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy, ShardedStrategy)):
        raise SettingError(
            "trainer.strategy",
            f"{type(trainer.strategy).__name__} is not supported: it shards or rewrites parameters that are read by "
            "name here",
            do="Use one device, trainer.strategy=ddp, or trainer=fsdp",
        )
    if any(p.dtype != torch.float32 for p in model.parameters()):
        raise SettingError(
            "trainer.precision",
            f"{trainer.precision} does not keep the drafter's weights in float32 (in half precision small updates "
            "are lost: norm weights would stay exactly 1)",
            do="Use bf16-mixed or 32-true",
        )


def check_checkpoint(checkpoint: dict[str, Any]) -> None:
    """Refuse to go on from a checkpoint with weights or optimizer moments that are no numbers.

    Nothing here writes one; versions before this check did, and every step from it on would diverge.

    Raises:
        ValueError: names the first such tensor and how many there are.
    """
    named = {f"weights {name}": value for name, value in checkpoint.get("state_dict", {}).items()}
    for optimizer in checkpoint.get("optimizer_states", []):
        for number, state in optimizer["state"].items():
            named |= {f"optimizer {name} of parameter {number}": value for name, value in state.items()}
    broken = [n for n, v in named.items() if isinstance(v, Tensor) and not torch.isfinite(v).all()]
    if broken:
        raise ValueError(
            f"the checkpoint of step {checkpoint.get('global_step')} cannot be resumed from: {len(broken)} of its "
            f"{len(named)} tensors hold NaN or infinity ({broken[0]} is the first), so the run had diverged before it "
            "was written. Start anew with --fresh (the earlier run and its best.ckpt are kept) and a lower optim.lr."
        )


def checksums(model: nn.Module) -> dict[str, int]:
    """Bit sums of the parameters: enough to see whether training changed them, without keeping a copy."""
    return {
        name: int(local(p.detach()).float().view(torch.int32).sum(dtype=torch.int64))
        for name, p in model.named_parameters()
    }
