"""Measures the drafter by decoding held-out prompts with it, for real and losslessly, while it trains."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.seed import isolate_rng

from dflash_lightning.callbacks.agreement import disagreement
from dflash_lightning.callbacks.figures import acceptance_figure, histogram_figure
from dflash_lightning.callbacks.samples import log_samples
from dflash_lightning.callbacks.stopping import last_checkpoint, may_end_at_once
from dflash_lightning.data import left_out_line, load_prompts, render_prompt
from dflash_lightning.decoding import DecodeStats, DecodingSettings
from dflash_lightning.decoding.evaluation import Evaluation, Evaluator
from dflash_lightning.decoding.metric import SpeculativeMetric
from dflash_lightning.errors import SettingError
from dflash_lightning.module import DraftModule
from dflash_lightning.progress import print_line
from dflash_lightning.target.parallel import check_whole
from dflash_lightning.target.room import check_room
from dflash_lightning.types import Alignment


class SpeculativeEval(Callback):
    """Decodes held-out prompts before training, after epochs (or every ``every_n_steps`` steps) and at the end.

    This is a callback and no validation loop of Lightning's. Decoding comes before the first training step and after
    the last one, where Lightning has no validation. A rank without prompts takes part in the sums, and a loader must
    not be empty. One evaluator with its compiled graphs and plain answers lives through all of it. The module's modes
    stay as they are. Checkpoints that follow a figure are told of it as after a validation.

    Prompts are dealt out over the ranks, and sums (never ratios) are reduced. The run's weights are the same bits with
    and without this callback: random states are put back, decoding works on a copy of the drafter, the target is only
    read.
    ``last.ckpt`` is written before decoding, so that a failure here loses nothing: what was not measured then is
    measured on resuming.

    Logged: ``decode/tau`` (tokens committed per round, pooled), survival by slot, shares of answers that repeat
    themselves or are cut, stage times, identity with the same loop without drafts on the first ``lossless_prompts``
    prompts and, where one prompt is decoded at a time, the speed-up over it; histogram and acceptance as figures.
    ``ModelCheckpoint(monitor="decode/tau", mode="max", save_on_train_epoch_end=False)`` keeps the best: it saves after
    every evaluation, as it does after a validation.

    Args:
        prompts: JSONL file of held-out prompts.
        decoding: how to decode; greedy in float32 must come out identical to plain decoding.
        limit: prompts used, the first ones of the file; null uses all.
        lossless_prompts: of those, how many are decoded plainly as well.
        every_n_steps: null evaluates at the end of every epoch; a period leaves out epochs' ends, but not the last.
        chat_template_kwargs: passed to the target's chat template; must be what training used.
    """

    def __init__(
        self,
        prompts: str,
        *,
        decoding: DecodingSettings,
        limit: int | None = 64,
        lossless_prompts: int = 4,
        every_n_steps: int | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise SettingError(
                "callbacks.speculative_eval.every_n_steps",
                f"{every_n_steps} is no period",
                "Use 1 or more, or null for epochs",
            )
        decoding.check_steady("callbacks.speculative_eval.decoding")
        self.prompts = prompts
        self.decoding = decoding
        self.limit = limit
        self.lossless_prompts = lossless_prompts
        self.every_n_steps = every_n_steps
        self.chat_template_kwargs = chat_template_kwargs or {}
        self.history: list[dict[str, float]] = []
        self.seconds = self.cpu_seconds = 0.0  # spent here in this process, compilation included
        self._has_warned = False
        self._evaluator: Evaluator | None = None
        self._rendered: list[list[int]] = []

    @property
    def saves_epochs(self) -> bool:
        """Whether ``last.ckpt`` is written at the end of every epoch."""
        return self.every_n_steps is None

    @property
    def num_prompts(self) -> int:
        """Prompts of every evaluation."""
        return len(load_prompts(self.prompts, limit=self.limit))

    def count(self, steps: int, steps_per_epoch: int, *, done: int = 0) -> int:
        """How many evaluations are left of a run of ``steps`` optimizer steps, ``done`` of which are made.

        A run that has not begun has one before training too.
        """
        period = self.every_n_steps or max(1, steps_per_epoch)
        return math.ceil(steps / period) - done // period + (done == 0)

    # -- when ---------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(pl_module, DraftModule):
            raise SettingError(
                "callbacks.speculative_eval",
                f"decodes with a DraftModule, but the trainer was given {type(pl_module).__name__}",
                do="Fit a DraftModule, or leave the callback out",
            )
        if pl_module.target.cut:
            check_lockstep(self.decoding)
        self._evaluator = None
        rows = load_prompts(self.prompts, limit=self.limit)
        target = pl_module.target
        self._rendered = [
            render_prompt(target.tokenizer, row, vocab_size=target.facts.vocab_size, **self.chat_template_kwargs)
            for row in rows
        ]
        if trainer.is_global_zero and (left_out := left_out_line(rows)) is not None:
            print_line(left_out)
        check_room(
            [len(ids) for ids in self._rendered],
            target.facts.max_positions,
            target.facts.name,
            max_new_tokens=self.decoding.max_new_tokens,
            num_drafts=Alignment(
                self.decoding.block_size or pl_module.block.largest_size, 0, pl_module.block.label_layout
            ).num_drafts,
            setting="decoding.max_new_tokens",
            call=lambda place: f"prompt {place + 1} of {self.prompts}",
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before training; and on resuming what was saved and then not measured, or measured and lost with the run."""
        step, period = trainer.global_step, self.every_n_steps
        if step == 0:
            self._measure(trainer, pl_module, "before training")
        elif not self._is_measured(step) and (trainer.is_last_batch if period is None else step % period == 0):
            self._measure(trainer, pl_module, f"resuming at step {step}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self.every_n_steps is not None and step % self.every_n_steps == 0 and not self._is_measured(step):
            self._save_and_measure(trainer, pl_module, f"step {step}")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.every_n_steps is None:
            self._save_and_measure(trainer, pl_module, f"epoch {trainer.current_epoch}")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The final weights, where the period passed over them or the run was cut while they were measured.

        The one hook that a run resumed at its end has; Lightning has moved the module to the CPU by then.
        """
        step = trainer.global_step
        if step > 0 and not self._is_measured(step):
            pl_module.to(trainer.strategy.root_device)
            self._save_and_measure(trainer, pl_module, f"step {step}")
            pl_module.cpu()

    def _is_measured(self, step: int) -> bool:
        return bool(self.history) and self.history[-1]["step"] == step

    # -- what ---------------------------------------------------------------------------------------------------------

    def _save_and_measure(self, trainer: Trainer, pl_module: LightningModule, title: str) -> None:
        _save_last(trainer)
        self._measure(trainer, pl_module, title)

    def _measure(self, trainer: Trainer, pl_module: LightningModule, title: str) -> None:
        assert isinstance(pl_module, DraftModule)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        begin, cpu = time.monotonic(), time.process_time()
        with isolate_rng(), may_end_at_once(trainer):
            evaluation = _reduce(self._evaluate(trainer, pl_module, f"decoding, {title}"), pl_module.device)
        figures = evaluation.figures()
        self.history.append({"step": float(trainer.global_step), **figures})
        self._log(trainer, pl_module, evaluation, figures)
        warning = disagreement(*pl_module.step_log.take_first_slot(), evaluation.stats)
        if trainer.is_global_zero:
            print_line(evaluation.table(f"decoding, {title}", interval=True))
            if warning is not None and not self._has_warned:
                print_line(warning)
                self._has_warned = True
        for checkpoint in trainer.checkpoint_callbacks:  # decoding is the validation of a drafter
            checkpoint.on_validation_end(trainer, pl_module)
        seconds = time.monotonic() - begin
        self.seconds += seconds
        self.cpu_seconds += time.process_time() - cpu
        pl_module.step_log.throughput.leave_out(seconds)

    def _evaluate(self, trainer: Trainer, module: DraftModule, title: str) -> Evaluation:
        draft = module.whole_draft()  # every rank, every time
        if self._evaluator is None:
            rank, world = self._share(trainer, module)
            numbers = list(range(len(self._rendered)))[rank::world]
            self._evaluator = Evaluator(
                module.target,
                draft,
                [self._rendered[i] for i in numbers],
                self.decoding,
                num_checked=sum(i < self.lossless_prompts for i in numbers),
                request_ids=numbers,
                shown=trainer.is_global_zero,
            )
        found = self._evaluator(title)
        counts = trainer.is_global_zero or not module.target.cut
        return found if counts else found.without_counts()

    def _share(self, trainer: Trainer, module: DraftModule) -> tuple[int, int]:
        """Number of this rank's first prompt, and the step to its next one; ranks that share a target decode all."""
        return (0, 1) if module.target.cut else (trainer.global_rank, trainer.world_size)

    def _log(self, trainer: Trainer, module: DraftModule, evaluation: Evaluation, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            # The same on every rank already: they were made from reduced sums.
            trainer.callback_metrics[name] = torch.tensor(value)
        first, step = self._share(trainer, module)
        prompts = self._rendered[first::step]
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=trainer.global_step)
            if trainer.is_global_zero:
                log_samples(logger, module.target.tokenizer, prompts, evaluation.outputs, trainer.global_step)
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero and evaluation.stats.rounds:
                writer, step = logger.experiment, trainer.global_step
                writer.add_figure("decode/accepted_drafts", histogram_figure(evaluation.stats), step)
                writer.add_figure("decode/acceptance_by_slot", acceptance_figure(evaluation.stats), step)

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = state_dict["history"]


def check_lockstep(decoding: DecodingSettings) -> None:
    """Refuse decoding whose course depends on time: ranks that share a target must all take the same one.

    Raises:
        ValueError: names the setting.
    """
    timed = [name for name in ("adaptive", "builder", "policy") if getattr(decoding, name)]
    what = "what is drafted may depend on measured time, which differs between ranks"
    check_whole(bool(timed), f"decoding.{timed[0] if timed else ''}", what)


def _save_last(trainer: Trainer) -> None:
    """Write ``last.ckpt`` where the run keeps its checkpoints; every rank takes part."""
    callback, place = trainer.checkpoint_callback, last_checkpoint(trainer)
    if place is None and isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
        place = Path(callback.dirpath) / "last.ckpt"
    if place is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        trainer.save_checkpoint(place, weights_only=False)


def _reduce(evaluation: Evaluation, device: torch.device) -> Evaluation:
    """Sums over ranks; every rank calls this, with or without prompts of its own."""

    def total(stats: DecodeStats) -> DecodeStats:
        metric = SpeculativeMetric(stats.num_drafts).to(device)
        metric.update(stats)
        return metric.compute()

    return dataclasses.replace(
        evaluation,
        stats=total(evaluation.stats),
        checked=total(evaluation.checked),
        plain=total(evaluation.plain),
    )
