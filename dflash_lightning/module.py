"""The LightningModule: joins a frozen target with a trainable drafter and turns a batch into a loss.

One step reads the same for every method, because methods differ only in the parts that are plugged in::

    batch -> target features -> conditioning -> drafter -> head views -> sum of coef * numerator / denominator
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from jaxtyping import Bool, Float
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from dflash_lightning.block import BlockConstructor
from dflash_lightning.conditioning import Conditioning
from dflash_lightning.drafter import Drafter
from dflash_lightning.errors import SettingError
from dflash_lightning.head import DraftHead
from dflash_lightning.loss import LossShare, LossTerm, total_loss
from dflash_lightning.model import DraftModel
from dflash_lightning.model.start import DraftPlan
from dflash_lightning.ops.lm_head import Argmax, HeadOutput, LanguageHead, Teacher
from dflash_lightning.target import FrozenTarget
from dflash_lightning.target.parallel import is_cut
from dflash_lightning.training.growth import follow_checkpoint
from dflash_lightning.training.guard import (
    ADVICE,
    Diverged,
    StepGuard,
    StepRecord,
    check_checkpoint,
    check_trainer,
    checksums,
    make_guard,
)
from dflash_lightning.training.log import StepLog
from dflash_lightning.training.optim import LengthChange, OptimSettings, gradients, length_change, set_rates
from dflash_lightning.training.requirements import (
    check_labels,
    check_signals,
    check_slots,
    check_tallies,
    check_teacher,
)
from dflash_lightning.training.rounds import begin_rounds, play_round
from dflash_lightning.training.sharded import broken, clip, gathered, shard, total_norm
from dflash_lightning.types import BlockLayout, FeatureSpec, SlotTotals, StepContext, TargetFeatures, TrainBatch


class DraftModule(LightningModule):
    """Trains one drafter against one frozen target.

    The target is a plain object: it is in no ``state_dict``, no optimizer and not wrapped by DDP. The parts are
    settings until ``configure_model`` builds the drafter for this target, so the constructor is cheap.

    Args:
        target: the frozen model; its embedding and language head serve the drafter.
        loss: terms by name; the training loss is the sum of ``coef * numerator / denominator`` over them.
        draft_vocabulary: ``"data"`` limits the drafter to the token ids that occur in the training rows; null uses all.
        init_from: a run folder, a checkpoint or a drafter's folder whose weights training starts from, or
            ``{path, parts, change}``: which of its parts, and what may differ from the recipe (``model.origin``).
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
        init_from: str | Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not loss:
            raise SettingError(
                "loss", "no term is given, so there is nothing to train on", do="Add one, e.g. loss=cross_entropy"
            )
        self.target = target
        self.block = block
        # Settings; the modules that are trained are built from them and live in self.model only.
        self.plan = DraftPlan(block, conditioning, drafter, head, draft_vocabulary, init_from, seed)
        self.terms = dict(loss)
        self.optim = optim
        self.model: DraftModel | None = None
        self._whole: list[DraftModel] = []  # in a list, where it is no part of this module
        self._totals: tuple[tuple[int, int], SlotTotals] | None = None
        self._initial: dict[str, int] = {}
        self.step_log = StepLog()
        self._window_samples: list[Tensor] = []
        self._guard: StepGuard | None = None
        self._norm: Tensor | None = None
        # Of the checkpoint that is resumed: the scheduler's state, and whether the run's length had changed before.
        self._resumed: tuple[dict[str, Any], LengthChange | None] | None = None
        self._change: LengthChange | None = None

    # -- building -----------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Build the drafter for the target and the data; does nothing when it is built already."""
        self.prepare(self.trainer.datamodule if self._trainer is not None else None)  # type: ignore[attr-defined]
        if self.device_mesh is not None and not is_cut(self.draft_model):  # of ``ShardedStrategy``
            shard(self.draft_model, self.device_mesh["data_parallel"])

    def prepare(self, data: Any | None) -> None:
        """What ``configure_model`` does, for ``data`` (a ``DraftData`` or null); needs no trainer."""
        if self.model is None:
            check_signals(self.terms, self.plan.head)
            check_slots(self.terms, self.plan.block)
            self.model = self.plan.make(self.target, {} if data is None else data.used_ids())
        self.model.bind(self.target)
        self._lm: LanguageHead = self.model.head_of(self.target.lm)
        if data is not None:
            self.model.config.chat_template_kwargs = dict(data.chat_template_kwargs)
            self.model.head.count_labels(data.label_counts)
            check_labels(self.terms, data.summary.why_not_samples, unknown=data.summary.labels == "unknown")
            check_teacher(self.terms, data.feature_products)
            data.bind(self.block, self.model.alignment, self.required(), self._vocabulary_mask())

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

    def whole_draft(self) -> DraftModel:
        """The drafter with all of its weights, to decode with; every rank must call this.

        Where it is sharded this is a copy, which the next call makes up to date.
        """
        if is_cut(self.draft_model):
            self._whole = [gathered(self.draft_model, self.target, *self._whole)]
        return self._whole[0] if self._whole else self.draft_model

    def required(self) -> FeatureSpec:
        """Target features that the drafter and the loss terms read, united."""
        spec = self.draft_model.required()
        for term in self.terms.values():
            spec = spec | term.required()
        return spec

    # -- training -----------------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        check_trainer(self.trainer, self.draft_model)
        check_tallies(self.terms, self.trainer.accumulate_grad_batches)
        self.target.to(self.device)
        if self.draft_model.conditioning.carries:
            self._reader = begin_rounds(self.target, self.draft_model, self.trainer)
        self._lm = self.draft_model.head_of(self.target.lm)
        self._initial = checksums(self.draft_model)
        self._totals, self._window_samples, self._guard = None, [], self._make_guard()

    def _make_guard(self) -> StepGuard:
        return make_guard(self.draft_model, self.device, scaled=self._scaled)

    @property
    def _scaled(self) -> bool:
        """Whether gradients are scaled against underflow (float16)."""
        return getattr(self.trainer.precision_plugin, "scaler", None) is not None

    def on_train_start(self) -> None:
        for optimizer in self.trainer.optimizers:
            moments = [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
            assert all(v.dtype == torch.float32 for v in moments), "optimizer state was restored in half precision"
        set_rates(config.scheduler for config in self.trainer.lr_scheduler_configs)
        self.step_log = StepLog(self.target.reading)

    def training_step(self, batch: TrainBatch, batch_idx: int) -> Float[Tensor, ""]:
        if self.draft_model.conditioning.carries:
            batch = play_round(self.draft_model, self._reader, batch, self.required(), self._lm, self.global_step)
        out, features = self.outputs(batch)
        if self._metrics_due():
            out.views["main"].plan(Argmax())  # answered in the same pass as the losses
        shares = self.loss_shares(batch, out, features, self._step_context(), self._window_totals(batch))
        for name, share in shares.items():
            self.step_log.add_share(name, share)
        loss = total_loss(shares)
        self.step_log.add("train/loss", loss)
        self.step_log.add("tokens", (batch.doc_ids >= 0).sum().float())
        self.step_log.add("blocks", batch.layout.keep.sum().float())
        self._window_samples.append(batch.sample_ids)
        if self._metrics_due():
            self.step_log.count_correct(out.views["main"], batch.layout)
        if self._guard is not None:
            self._guard.settle()
        # DDP averages gradients over ranks and Lightning divides by the accumulation: undo both, the totals cover them.
        return loss * (self.trainer.world_size * self.trainer.accumulate_grad_batches)

    def outputs(self, batch: TrainBatch) -> tuple[HeadOutput, TargetFeatures]:
        """What the losses ask about, and the target's features; they are made here where the batch has none."""
        layout, features = batch.layout, batch.features
        if features is None:
            spec = self.required()
            with self.target.reading.timed(self.target.device):
                features = self.target.features(batch.input_ids, batch.position_ids, spec, packed=batch.packed)
        hidden = self.draft_model.block_hidden(
            self.target.embed(layout.input_ids), layout, features, batch.position_ids, self._lm, batch.carried
        )
        return self.draft_model.outputs(hidden, layout, self._lm), features

    def loss_shares(
        self,
        batch: TrainBatch,
        out: HeadOutput,
        features: TargetFeatures,
        context: StepContext,
        totals: SlotTotals,
    ) -> dict[str, LossShare]:
        """Every loss term in this micro-batch, as a share of a window with ``totals``."""
        layout, teacher = batch.layout, self._teacher(features, batch.layout)
        return {
            name: term.in_window(out, layout, teacher, context, totals, self._sum_over_ranks)
            for name, term in self.terms.items()
        }

    def _teacher(self, features: TargetFeatures, layout: BlockLayout) -> Teacher | None:
        """The target's own law, where a loss term asks for it."""
        if not any(term.required().last_hidden for term in self.terms.values()):
            return None
        assert features.last_hidden is not None, "features were made without the last hidden state that a loss needs"
        laws = dict.fromkeys(temperature for term in self.terms.values() for temperature in term.laws())
        return Teacher(features.last_hidden, layout, self.target.lm, self._lm.ids, tuple(laws))

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
        if self._trainer is not None and self.trainer.world_size > 1:
            torch.distributed.all_reduce(vector)
        return vector

    # -- what is logged -----------------------------------------------------------------------------------------------

    def _metrics_due(self) -> bool:
        """Whether Lightning will write what this optimizer step logs (it counts steps from 1)."""
        period = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return period > 0 and (self.global_step + 1) % period == 0

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the finished accumulation window: sums over micro-batches and ranks, so no split changes a number.

        The gradients' norm is computed once, here: for the log, for the check and for clipping.

        Raises:
            Diverged: loss or gradients are not finite.
        """
        reduced = self.step_log.reduce(self._sum_over_ranks)
        self._norm = total_norm(gradients(optimizer))
        samples, self._window_samples = self._window_samples, []
        rate = optimizer.param_groups[0]["lr"]
        if self._guard is not None:
            loss = reduced["train/loss"].squeeze()
            record = StepRecord(self.global_step + 1, self.current_epoch, rate, loss, self._norm, samples)
            self._guard.judge(record, optimizer)
        shown = ("train/loss", "train/accuracy")
        first = self.draft_model.alignment.first_slot
        for name, value in self.step_log.figures(reduced, self._norm, rate, first).items():
            self.log(name, value, prog_bar=name in shown, batch_size=1)

    # -- optimizer and checkpoints ------------------------------------------------------------------------------------

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip with the norm that is known already.

        Lightning's own way refuses every fused optimizer under mixed precision, because with a scaler (float16) it
        would see scaled gradients. bfloat16 has none, and float16 gets an optimizer that is not fused.
        """
        if gradient_clip_val:
            clip(optimizer, float(gradient_clip_val), self._norm, gradient_clip_algorithm)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        total = self.trainer.estimated_stepping_batches
        if math.isinf(total):
            raise SettingError("trainer", "its length is unbounded", "Set trainer.max_epochs or trainer.max_steps")
        self._change = None
        if self._resumed is not None:
            self._change = length_change(self.optim, int(total), *self._resumed)
        optim, change = self.optim, self._change
        parameters = [p for p in self.draft_model.parameters() if p.requires_grad]
        optimizer = optim.make_optimizer(parameters, scaled=self._scaled)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: optim.factor(step, int(total), change))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what remakes the drafter without the recipe; plain types only, so ``weights_only=True`` loads it.

        Raises:
            Diverged: the weights are not finite, or the last step was a bad one: a good checkpoint is not replaced.
        """
        if self._guard is not None:
            self._guard.settle()
        if broken := self.broken_parameters():
            raise Diverged(
                f"the run diverged at optimizer step {self.global_step}: {len(broken)} of "
                f"{len(list(self.draft_model.parameters()))} parameters hold NaN or infinity ({broken[0]} is the "
                f"first), so nothing is saved over the earlier checkpoint.\n{ADVICE}"
            )
        checkpoint["draft_config"] = self.draft_model.config.to_dict()
        checkpoint["length_change"] = None if self._change is None else asdict(self._change)
        checkpoint["optim"] = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.optim).items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_checkpoint(checkpoint)
        follow_checkpoint(self.block, self.draft_model, checkpoint["draft_config"])
        if checkpoint.get("lr_schedulers"):
            change = checkpoint.get("length_change")
            self._resumed = (checkpoint["lr_schedulers"][0], None if change is None else LengthChange(**change))

    def broken_parameters(self) -> list[str]:
        """Names of the drafter's parameter tensors that hold a NaN or an infinity: the run has diverged."""
        return broken(self.draft_model)

    def changed_parameters(self) -> int:
        """How many parameter tensors of the drafter differ from when ``fit`` began."""
        return sum(self._initial[name] != value for name, value in checksums(self.draft_model).items())
