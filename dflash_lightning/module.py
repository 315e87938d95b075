"""The LightningModule: joins a frozen target with a trainable drafter and turns a batch into a loss.

One step reads the same for every method, because methods differ only in the parts that are plugged in::

    batch -> target features -> conditioning -> drafter -> head views -> sum of coef * numerator / denominator
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from dflash_lightning.block import BlockConstructor
from dflash_lightning.conditioning import Conditioning
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.drafter import Drafter
from dflash_lightning.head import DraftHead
from dflash_lightning.loss import LossTerm
from dflash_lightning.model import DraftModel
from dflash_lightning.model_start import DraftPlan
from dflash_lightning.ops.lm_head import Argmax, LanguageHead, View
from dflash_lightning.schedule import warmup_cosine
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import BlockLayout, FeatureSpec, SlotTotals, StepContext, TrainBatch


@dataclass(frozen=True)
class OptimSettings:
    """AdamW with linear warm-up and a half cosine; every length is counted in optimizer steps.

    ``warmup_steps`` wins over ``warmup_fraction`` (of all optimizer steps) when it is given.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    warmup_fraction: float = 0.04
    warmup_steps: int | None = None
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"optim.lr: {self.lr} does not move the weights. Use a positive number, such as 6e-4.")
        if not 0 <= self.warmup_fraction < 1:
            raise ValueError(
                f"optim.warmup_fraction: {self.warmup_fraction} is not a share of the run. Use 0 <= fraction < 1, "
                "or set optim.warmup_steps to count optimizer steps."
            )

    def factor(self, step: int, total_steps: int) -> float:
        """Learning-rate factor of optimizer step ``step`` (0-based) of ``total_steps``."""
        warmup = self.warmup_steps if self.warmup_steps is not None else math.ceil(self.warmup_fraction * total_steps)
        return warmup_cosine(step, warmup_steps=warmup, total_steps=total_steps, final_fraction=self.final_fraction)


class DraftModule(LightningModule):
    """Trains one drafter against one frozen target.

    The target is a plain object: it is in no ``state_dict``, no optimizer and not wrapped by DDP. The parts are
    settings until ``configure_model`` builds the drafter for this target, so the constructor is cheap.

    Args:
        target: the frozen model; its embedding and language head serve the drafter.
        loss: terms by name; the training loss is the sum of ``coef * numerator / denominator`` over them.
        draft_vocabulary: ``"data"`` limits the drafter to the token ids that occur in the training rows; null uses all.
        init_from: a run folder, a checkpoint or a drafter's folder whose weights training starts from; it must have
            been made for this target.
        seed: decides the drafter's initial weights.
    """

    def __init__(
        self,
        target: FrozenTarget,
        *,
        block: BlockConstructor,
        conditioning: Conditioning,
        drafter: Drafter,
        head: DraftHead,
        loss: Mapping[str, LossTerm],
        optim: OptimSettings,
        draft_vocabulary: str | None = None,
        init_from: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not loss:
            raise ValueError(
                "loss: no term is given, so there is nothing to train on. Add one, e.g. loss=cross_entropy."
            )
        self.target = target
        self.block = block
        # Settings; the modules that are trained are built from them and live in self.model only.
        self.plan = DraftPlan(block, conditioning, drafter, head, draft_vocabulary, init_from, seed)
        self.terms = dict(loss)
        self.optim = optim
        self.model: DraftModel | None = None
        self._totals: tuple[tuple[int, int], SlotTotals] | None = None
        self._sums: dict[str, Tensor] = {}
        self._first_slot: Tensor | None = None
        self._initial: dict[str, int] = {}

    # -- building -----------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Build the drafter for the target and the data; does nothing when it is built already."""
        if self.model is None:
            self.model = self.plan.make(self.target, self._used_ids())
        self._lm: LanguageHead = self.model.head_of(self.target.lm)
        data = self.trainer.datamodule if self._trainer is not None else None  # type: ignore[attr-defined]
        if data is not None:
            self.model.config.chat_template_kwargs = dict(data.chat_template_kwargs)
            self._check_labels(data.summary.labels)
            data.bind(self.block, self.model.alignment, self.required(), self._vocabulary_mask())

    def _used_ids(self) -> set[int]:
        data = self.trainer.datamodule if self._trainer is not None else None  # type: ignore[attr-defined]
        return data.used_ids() if data is not None else set()

    def _check_labels(self, labels: str) -> None:
        """Refuse greedy responses where a loss term needs the target's own draws; warn where nobody knows."""
        asking = [name for name, term in self.terms.items() if term.needs_samples]
        if asking and labels == "greedy":
            raise ValueError(
                f"loss.{asking[0]}: needs responses drawn from the target, but data.train holds greedy ones (its "
                ".meta.json says so). Regenerate them at temperature 1, or use another loss."
            )
        if asking and labels == "unknown":
            rank_zero_warn(
                f"loss.{asking[0]} needs responses drawn from the target; nothing says how those in data.train were "
                "made."
            )

    def _vocabulary_mask(self) -> Bool[Tensor, " V"] | None:
        if self.draft_model.config.draft_vocab_size is None:
            return None
        # On the CPU, where blocks are cut, also while Lightning builds modules on the device.
        mask = torch.zeros(self.target.facts.vocab_size, dtype=torch.bool, device="cpu")
        mask[self.draft_model.draft_vocab.cpu()] = True
        return mask

    @property
    def draft_model(self) -> DraftModel:
        """The drafter; exists once ``configure_model`` has run."""
        assert self.model is not None, "configure_model has not run"
        return self.model

    def required(self) -> FeatureSpec:
        """Target features that the drafter and the loss terms read, united."""
        spec = self.draft_model.required()
        for term in self.terms.values():
            spec = spec | term.required()
        return spec

    # -- training -----------------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        self._check_trainer()
        self.target.to(self.device)
        self._lm = self.draft_model.head_of(self.target.lm)
        self._initial = _checksums(self.draft_model)
        self._totals, self._sums, self._first_slot = None, {}, None

    def _check_trainer(self) -> None:
        """Refuse what would train silently worse, or not at all."""
        strategy = self.trainer.strategy
        if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
            raise ValueError(
                f"trainer.strategy: {type(strategy).__name__} is not supported: it shards or rewrites parameters that "
                "are read by name here. A drafter is small: use one device or trainer.strategy=ddp."
            )
        if any(p.dtype != torch.float32 for p in self.draft_model.parameters()):
            raise ValueError(
                f"trainer.precision: {self.trainer.precision} keeps the drafter's weights in half precision, where "
                "small updates are lost (norm weights would stay exactly 1). Use bf16-mixed or 32-true."
            )

    def on_train_start(self) -> None:
        for optimizer in self.trainer.optimizers:
            moments = [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
            assert all(v.dtype == torch.float32 for v in moments), "optimizer state was restored in half precision"

    def training_step(self, batch: TrainBatch, batch_idx: int) -> Float[Tensor, ""]:
        layout, context = batch.layout, self._step_context()
        features = batch.features
        if features is None:
            features = self.target.features(batch.input_ids, batch.position_ids, self.required(), packed=batch.packed)
        hidden = self.draft_model.block_hidden(
            self.target.embed(layout.input_ids), layout, features, batch.position_ids
        )
        views = self.draft_model.views(hidden, layout, self._lm)
        if self._metrics_due():
            views["main"].plan(Argmax())  # answered in the same pass as the losses

        totals = self._window_totals(batch)
        shift = self.draft_model.alignment.shift
        # DDP averages gradients over ranks and Lightning divides by the accumulation: undo both, the totals cover them.
        undo = self.trainer.world_size * self.trainer.accumulate_grad_batches
        loss = hidden.new_zeros((), dtype=torch.float32)
        for name, term in self.terms.items():
            denominator = term.denominator(totals, shift)
            share = term.numerator(views, layout, features, context) / torch.where(denominator > 0, denominator, 1.0)
            loss = loss + term.coef(context) * share
            self._add(f"train/loss/{name}", share)
        self._add("train/loss", loss)
        if self._metrics_due():
            self._count_correct(views["main"], layout)
        return loss * undo

    def _step_context(self) -> StepContext:
        return StepContext(self.global_step, int(self.trainer.estimated_stepping_batches), self.current_epoch)

    def _window_totals(self, batch: TrainBatch) -> SlotTotals:
        """Counts of the accumulation window over all ranks, reduced once per window."""
        key = (self.current_epoch, batch.window)
        if self._totals is None or self._totals[0] != key:
            self._totals = (key, SlotTotals.unpack(self._sum_over_ranks(batch.window_totals.pack())))
        return self._totals[1]

    def _sum_over_ranks(self, vector: Float[Tensor, " Q"]) -> Float[Tensor, " Q"]:
        """Every rank must call this with a vector of the same length, whatever its batch holds."""
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(vector)
        return vector

    # -- what is logged -----------------------------------------------------------------------------------------------

    def _metrics_due(self) -> bool:
        """Whether Lightning will write what this optimizer step logs (it counts steps from 1)."""
        period = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return period > 0 and (self.global_step + 1) % period == 0

    def _add(self, name: str, value: Tensor) -> None:
        value = value.detach()
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    @torch.no_grad()
    def _count_correct(self, view: View, layout: BlockLayout) -> None:
        (guess,) = view.scalars(Argmax())
        self._add("correct", ((guess == layout.labels) & layout.scored).sum((0, 1)).float())
        self._add("scored", layout.scored.sum((0, 1)).float())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the finished accumulation window: sums over micro-batches and ranks, so no split changes a number."""
        names = sorted(self._sums)
        sizes = [self._sums[name].numel() for name in names]
        vector = self._sum_over_ranks(torch.cat([self._sums[name].flatten() for name in names]))
        reduced = dict(zip(names, vector.split(sizes), strict=True))
        self._sums = {}
        correct, scored = reduced.pop("correct", None), reduced.pop("scored", None)
        for name, value in reduced.items():
            self.log(name, value.squeeze(), prog_bar=name == "train/loss", batch_size=1)
        if correct is None or scored is None:
            return
        self.log("train/accuracy", correct.sum() / scored.sum().clamp(min=1), prog_bar=True, batch_size=1)
        first = self.draft_model.alignment.first_slot
        for slot in range(first, len(correct)):
            value = correct[slot] / scored[slot].clamp(min=1)
            self.log(f"train/accuracy/slot_{slot - first + 1}", value, batch_size=1)
        pair = torch.stack([correct[first], scored[first]])
        self._first_slot = pair if self._first_slot is None else self._first_slot + pair

    def take_first_slot(self) -> tuple[int, int]:
        """First drafts that were right, and all of them, in the logged steps since the last call, over all ranks."""
        right, counted = (0, 0) if self._first_slot is None else self._first_slot.tolist()
        self._first_slot = None
        return int(right), int(counted)

    # -- optimizer and checkpoints ------------------------------------------------------------------------------------

    def configure_optimizers(self) -> OptimizerLRScheduler:
        total = self.trainer.estimated_stepping_batches
        if math.isinf(total):
            raise ValueError("trainer: the number of steps is unbounded. Set trainer.max_epochs or trainer.max_steps.")
        optim = self.optim
        parameters = [p for p in self.draft_model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            parameters,
            lr=optim.lr,
            betas=optim.betas,
            weight_decay=optim.weight_decay,
            fused=True,  # 3x faster on a CPU
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: optim.factor(step, int(total)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what remakes the drafter without the recipe; plain types only, so ``weights_only=True`` loads it."""
        checkpoint["draft_config"] = self.draft_model.config.to_dict()
        checkpoint["optim"] = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.optim).items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # By way of the class, which fills in what a checkpoint of an older version does not state.
        theirs, ours = (
            c.to_dict() for c in (DraftConfig.from_dict(checkpoint["draft_config"]), self.draft_model.config)
        )
        differing = sorted(k for k in {*theirs, *ours} if theirs.get(k) != ours.get(k) and k not in _VOLATILE)
        if differing:
            lines = "; ".join(f"{k}: checkpoint {theirs.get(k)!r}, now {ours.get(k)!r}" for k in differing)
            raise ValueError(
                f"The checkpoint's drafter is not the one this recipe builds ({lines}). "
                "Resume with the recipe and data it was trained with, or start anew with --fresh."
            )

    def broken_parameters(self) -> list[str]:
        """Names of the drafter's parameter tensors that hold a NaN or an infinity: the run has diverged."""
        return [name for name, p in self.draft_model.named_parameters() if not torch.isfinite(p).all()]

    def changed_parameters(self) -> int:
        """How many parameter tensors of the drafter differ from when ``fit`` began."""
        return sum(self._initial[name] != value for name, value in _checksums(self.draft_model).items())


_VOLATILE = {"transformers_version", "_name_or_path"}


def _checksums(model: DraftModel) -> dict[str, int]:
    """Bit sums of the parameters: enough to see whether training changed them, without keeping a copy."""
    return {
        name: int(p.detach().float().view(torch.int32).sum(dtype=torch.int64)) for name, p in model.named_parameters()
    }
