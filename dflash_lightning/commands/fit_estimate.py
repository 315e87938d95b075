"""What a run will be: its sizes, and the minutes to expect, from a few micro-batches measured before it begins."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from dflash_lightning.callbacks import SpeculativeEval
from dflash_lightning.callbacks.activation_checkpointing import checkpointed_layers, checkpoints
from dflash_lightning.data import DraftData
from dflash_lightning.data.features.cache import Storage
from dflash_lightning.data.features.products import with_products
from dflash_lightning.data.features.served import FetchedFeatures
from dflash_lightning.device import abilities, wait
from dflash_lightning.loss import total_loss
from dflash_lightning.model.memory import StepMemory, step_memory
from dflash_lightning.module import DraftModule
from dflash_lightning.progress import readable_seconds
from dflash_lightning.recipe import Parts
from dflash_lightning.target import FrozenTarget
from dflash_lightning.training.log import memory_gib
from dflash_lightning.training.out_of_memory import explained
from dflash_lightning.training.rounds import play_round
from dflash_lightning.types import StepContext, TargetFeatures, TrainBatch

_MOST = 4  # micro-batches measured, the first of which warms up
_BUDGET = 10.0  # seconds after which no further one is begun
_BUSY = 0.6  # share of its cores that a measurement should get
_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_SHORT = 30.0  # a run that takes no longer is not worth a second measurement


@dataclass(frozen=True)
class Measured:
    """Seconds of one micro-batch and of one optimizer step.

    ``busy`` says that the measurement got less than ``_BUSY`` of the cores that it was to use.
    """

    features: float
    drafter: float
    optimizer: float
    micro_batches: int
    busy: bool = False


@dataclass(frozen=True)
class Estimate:
    """Sizes of a run and what it will take; ``done`` optimizer steps were made by earlier sessions."""

    documents: int
    rows: int
    rows_per_batch: int
    tokens: int
    micro_batches: int
    ranks: int
    accumulate: int
    steps: int
    steps_per_epoch: int
    done: int
    cached: bool
    evaluations: int
    prompts: int
    measured: Measured
    memory: str
    peak_gib: float

    @property
    def step_seconds(self) -> float:
        """Of one optimizer step; features made beside it (``data.prefetch_features``) take less than is said here."""
        m = self.measured
        return self.accumulate * (m.drafter + (0.0 if self.cached else m.features)) + m.optimizer

    @property
    def feature_seconds(self) -> float:
        """Of making the features once, where they are kept and not there yet; else 0."""
        return self.measured.features * math.ceil(self.micro_batches / self.ranks) if self.cached else 0.0

    @property
    def seconds(self) -> float:
        """Wall seconds that the rest of the fit takes, features included."""
        return self.step_seconds * max(self.steps - self.done, 0) + self.feature_seconds

    def line(self) -> str:
        """What is said before a run."""
        left = max(self.steps - self.done, 0)
        first = f", after {readable_seconds(self.feature_seconds)} of features" if self.feature_seconds >= 1 else ""
        more = f"; {self.evaluations} evaluations of {self.prompts} prompts come on top" if self.evaluations else ""
        return (
            f"expect about {readable_seconds(self.seconds)} of training on this machine: {left} optimizer steps of "
            f"{_seconds(self.step_seconds)}{first} ({self._basis}){more}"
        )

    @property
    def _basis(self) -> str:
        count = self.measured.micro_batches
        found = f"measured on {count} micro-batch{'es' if count > 1 else ''}"
        return found + (", while other programs kept this machine busy" if self.measured.busy else "")

    def table(self) -> str:
        """What ``--dry-run`` prints."""
        per_step = self.tokens / max(1, self.steps_per_epoch)
        m = self.measured
        kept = " (kept: made once)" if self.cached else ""
        lines = {
            "rows": f"{self.rows} of {self.documents} documents, {self.tokens} tokens an epoch",
            "micro-batches": f"{self.micro_batches} an epoch, of {self.rows_per_batch} rows each",
            "optimizer steps": f"{self.steps}, {self.steps_per_epoch} an epoch; {self.accumulate} micro-batches each, "
            f"on {self.ranks} ranks",
            "tokens per step": f"{per_step:.0f}, without padding",
            "memory": f"{self.memory}; {self.peak_gib:.1f} GiB were held at most while measuring",
            "one step": f"{_seconds(self.step_seconds)} (target features {_seconds(m.features)}{kept}, drafter "
            f"{_seconds(m.drafter)}, optimizer {_seconds(m.optimizer)})",
            "evaluations": f"{self.evaluations} of {self.prompts} prompts; not in the minutes below",
            "expect": f"about {readable_seconds(self.seconds)} of training on this machine",
        }
        return "\n".join(f"{name:<17}{text}" for name, text in lines.items())


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def estimate(parts: Parts, *, done: int = 0) -> Estimate | None:
    """Measure a few micro-batches of a run that has not begun; null for modules and data of one's own.

    Weights, random states, the loader's position and the target are left as they were. Data is read and the drafter
    built, which the run then finds done.
    """
    module, data, trainer = parts.module, parts.data, parts.trainer
    if not isinstance(module, DraftModule) or not isinstance(data, DraftData) or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    if module.target.cut:  # by one process alone it can be run as little as the others can without it
        return None
    data.setup()
    module.prepare(data)
    device = trainer.strategy.root_device
    module.to(device)
    module.target.to(device)
    plan, ranks, accumulate = data.plan(), trainer.world_size, trainer.accumulate_grad_batches
    batches = math.ceil(plan.num_micro_batches / ranks)
    limit = trainer.limit_train_batches
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    per_epoch = math.ceil(batches / accumulate)
    steps = _total_steps(trainer.max_epochs, trainer.max_steps, per_epoch)
    evaluations = [c for c in trainer.callbacks if isinstance(c, SpeculativeEval)]  # type: ignore[attr-defined]
    memory = expected_memory(module, data, trainer)
    short = _SHORT / max(1, (steps - done) * accumulate)
    layers = checkpointed_layers(module.draft_model.drafter, checkpoints(trainer))
    with isolate_rng(), explained(lambda: memory), layers:
        measured = _measure(parts, module, data, steps, short)
    return Estimate(
        documents=len(plan.documents),
        rows=plan.num_rows,
        rows_per_batch=data.rows_per_batch,
        tokens=int(plan.lengths.sum()),
        micro_batches=plan.num_micro_batches,
        ranks=ranks,
        accumulate=accumulate,
        steps=steps,
        steps_per_epoch=per_epoch,
        done=done,
        cached=data.cache_features is not None,
        evaluations=sum(c.count(steps, per_epoch, done=done) for c in evaluations),
        prompts=sum(c.num_prompts for c in evaluations),
        measured=measured,
        memory=memory.line().removeprefix("memory: "),
        peak_gib=memory_gib(device),
    )


def expected_memory(module: DraftModule, data: DraftData, trainer: Trainer) -> StepMemory:
    """By formula, for the largest micro-batch of the data."""
    tokens, blocks = data.plan().largest_row()
    rows, buckets = data.rows_per_batch, (data.token_bucket, data.block_bucket)
    padded = [rows * -(-count // bucket) * bucket for count, bucket in zip((tokens, blocks), buckets, strict=True)]
    return step_memory(
        module.target,
        module.draft_model,
        module.required(),
        tokens=padded[0],
        blocks=padded[1],
        autocast=_AUTOCAST.get(str(trainer.precision)),
        checkpointed=checkpoints(trainer),
        ahead=data.prefetches(trainer.strategy.root_device, reads=not module.draft_model.conditioning.carries),
    )


def _total_steps(max_epochs: int | None, max_steps: int, per_epoch: int) -> int:
    """Optimizer steps of a whole run; 0 for one without a bound, which is refused later."""
    bounds = [bound for bound in (max_steps, (max_epochs or -1) * per_epoch) if bound >= 0]
    return min(bounds, default=0)


def _measure(parts: Parts, module: DraftModule, data: DraftData, steps: int, short: float) -> Measured:
    """Seconds by part; one micro-batch is enough where it is long, or where the run is ``short`` seconds of each."""
    device, begin, cpu = parts.trainer.strategy.root_device, time.monotonic(), time.process_time()
    times: list[tuple[float, float]] = []
    plays, kept = module.draft_model.conditioning.carries, data.cache_features is not None
    reader = (with_products(module.target, data.feature_products) if kept else module.target) if plays else None
    compute = None if plays and not kept else _features_of(module, data)
    for batch in data.first_batches(_MOST):
        batch = move_data_to_device(batch, device)
        times.append(_time_batch(parts, module, compute, reader, batch, steps))
        on_cpu, last = not abilities(device).queues, sum(times[-1])
        if time.monotonic() - begin > _BUDGET or (on_cpu and last < short):
            break
    share = (time.process_time() - cpu) / (torch.get_num_threads() * max(time.monotonic() - begin, 1e-9))
    optimizer = _time_optimizer(module)
    module.zero_grad(set_to_none=True)
    counted = times[1:] or times  # the first one warms up
    features, drafter = (sum(part) / len(counted) for part in zip(*counted, strict=True))
    return Measured(features, drafter, optimizer, len(counted), busy=on_cpu and share < _BUSY)


def _features_of(module: DraftModule, data: DraftData) -> Callable[[TrainBatch], TargetFeatures]:
    """What makes features of a batch as training will, or as they are made once where they are kept."""
    spec = module.required()
    if (served := data.features.open_servers(module.target, spec)) is not None:
        fetched = FetchedFeatures(data.documents, Storage.of(module.target, spec, module.target.dtype), served)
        return lambda batch: move_data_to_device(fetched.gather(move_data_to_device(batch, "cpu")), module.device)
    target = with_products(module.target, data.feature_products, exact=spec.last_hidden)
    return lambda batch: target.features(batch.input_ids, batch.position_ids, spec, packed=batch.packed)


def _time_batch(
    parts: Parts,
    module: DraftModule,
    compute: Callable[[TrainBatch], TargetFeatures] | None,
    reader: FrozenTarget | None,
    batch: TrainBatch,
    steps: int,
) -> tuple[float, float]:
    """Seconds of the target's features, and of the drafter's forward and backward pass.

    ``reader`` null plays no rounds; ``compute`` null leaves the features to it.
    """
    begin = _now(batch)
    if compute is not None:
        batch.features = compute(batch)
    middle = _now(batch)
    with parts.trainer.precision_plugin.train_step_context():
        if reader is not None:
            batch = play_round(module.draft_model, reader, batch, module.required(), module._lm)
        out, features = module.outputs(batch)
        shares = module.loss_shares(batch, out, features, StepContext(0, steps, 0), batch.window_totals)
        loss = total_loss(shares)
    loss.backward()
    return middle - begin, _now(batch) - middle


def _time_optimizer(module: DraftModule) -> float:
    """Seconds of a step on copies of the parameters; the first one, which makes its state, does not count."""
    copies = []
    for parameter in module.draft_model.parameters():
        if parameter.requires_grad and parameter.grad is not None:
            copies.append(nn.Parameter(parameter.detach().clone()))
            copies[-1].grad = parameter.grad
    optimizer = module.optim.make_optimizer(copies, scaled=False)
    optimizer.step()
    begin = time.monotonic()
    optimizer.step()
    return time.monotonic() - begin


def _now(batch: TrainBatch) -> float:
    wait(batch.input_ids.device)
    return time.monotonic()
