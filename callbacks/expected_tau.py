"""What decoding would take, measured without decoding, every few steps."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.seed import isolate_rng

from dflash_lightning.acceptance import (
    AcceptanceEvaluator,
    ExpectedRounds,
    Texts,
    foreign_warning,
    read_texts,
    with_total,
)
from dflash_lightning.data.read.conversation import Supervise
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.errors import SettingError
from dflash_lightning.module import DraftModule
from dflash_lightning.progress import print_line
from dflash_lightning.target.parallel import check_whole

_LEAVE_OUT = "Leave the callback out"


class ExpectedTau(Callback):
    """Logs the tau that decoding held-out texts is expected to have, from one forward of the drafter on each.

    The texts must be the target's own, written as ``decoding`` decodes (``dflash regenerate``): greedily for greedy
    decoding, drawn by the same law for sampling. Then the figure is exact (``acceptance.AcceptanceEvaluator``): greedy,
    it is the tau of decoding the prompts of these texts. It needs no decoding, so it can be had every few steps; the
    target's part is computed once and kept. ``SpeculativeEval`` shows besides that decoding is lossless and fast.

    Logged before training, every ``every_n_steps`` optimizer steps and at the end: ``decode/expected_tau``, with
    several files also ``decode/expected_tau/DOMAIN``; ``decode/expected_acceptance/slot_K``, the share of drafts of a
    slot that stand where the drafts before them do. A checkpoint or an early stop that monitors one of these names is
    told after every measurement (``save_on_train_epoch_end=False``, ``check_on_train_epoch_end=False``).

    Texts are dealt out over the ranks, and sums are reduced; a rank without texts takes part. The run's weights are the
    same bits with and without this callback. Figures live in the checkpoint: a resumed run goes on where it was.

    Args:
        rows: a file of rows that are not in the training data, or one per domain.
        decoding: how to decode; what does not follow from texts is refused (``acceptance.AcceptanceRule``).
        limit: rows used of every file, the first ones; null uses all.
        every_n_steps: null measures at the end of every epoch.
        max_length: tokens of a document; longer ones are cut off. Null is what the target can read.
        supervise: whose turns of a conversation count, as in ``data``.
        chat_template_kwargs: passed to the target's chat template; must be what training used.
        prefix: what the names of the figures begin with; a second callback of this kind needs another one.
    """

    def __init__(
        self,
        rows: str | dict[str, str],
        *,
        decoding: DecodingSettings,
        limit: int | None = 16,
        every_n_steps: int | None = 50,
        max_length: int | None = None,
        supervise: Supervise = "all_turns",
        chat_template_kwargs: dict[str, Any] | None = None,
        prefix: str = "decode/expected_",
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise SettingError(
                "callbacks.expected_tau.every_n_steps",
                f"{every_n_steps} is no period",
                "Use 1 or more, or null for epochs",
            )
        if not rows:
            raise SettingError("callbacks.expected_tau.rows", "no file is given", do="Give a file, or one per domain")
        self.rows = rows
        self.decoding = decoding
        self.limit = limit
        self.every_n_steps = every_n_steps
        self.max_length = max_length
        self.supervise: Supervise = supervise
        self.chat_template_kwargs = chat_template_kwargs or {}
        self.prefix = prefix
        self.history: list[dict[str, float]] = []
        self.seconds, self.cpu_seconds = 0.0, 0.0  # spent here in this process
        self._texts: Texts | None = None
        self._evaluator: AcceptanceEvaluator | None = None

    @property
    def state_key(self) -> str:
        """Callbacks of this kind are told apart by their prefix."""
        return self._generate_state_key(prefix=self.prefix)

    # -- when ---------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(pl_module, DraftModule):
            raise SettingError(
                "callbacks.expected_tau",
                f"measures a DraftModule, but the trainer was given {type(pl_module).__name__}",
                do="Fit a DraftModule, or leave the callback out",
            )
        check_whole(pl_module.target.cut, "callbacks.expected_tau", "every rank reads texts of its own", _LEAVE_OUT)
        self._evaluator = None
        self._texts = read_texts(
            self.rows,
            pl_module.target,
            self.decoding,
            limit=self.limit,
            max_length=self.max_length,
            supervise=self.supervise,
            chat_template_kwargs=self.chat_template_kwargs,
            setting="callbacks.expected_tau.rows",
        )
        if trainer.is_global_zero:
            for warning in self._texts.warnings:
                print_line(f"warning: {warning}")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before training; and on resuming what was saved and then not measured."""
        self._make(trainer, pl_module)
        step, period = trainer.global_step, self.every_n_steps
        if not self._is_measured(step) and (step == 0 or (period is not None and step % period == 0)):
            self._measure(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self.every_n_steps is not None and step % self.every_n_steps == 0 and not self._is_measured(step):
            self._measure(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.every_n_steps is None and not self._is_measured(trainer.global_step):
            self._measure(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The final weights, where the period passed over them."""
        if trainer.global_step > 0 and not self._is_measured(trainer.global_step):
            self._measure(trainer, pl_module)

    def _is_measured(self, step: int) -> bool:
        return bool(self.history) and self.history[-1]["step"] == step

    # -- what ---------------------------------------------------------------------------------------------------------

    def _make(self, trainer: Trainer, module: LightningModule) -> None:
        """On every rank, so that all of them refuse what cannot be measured."""
        assert isinstance(module, DraftModule) and self._texts is not None
        shard = self._texts.shard(trainer.global_rank, trainer.world_size)
        self._evaluator = AcceptanceEvaluator(module.target, module.whole_draft(), shard, self.decoding)

    def _measure(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, DraftModule) and self._evaluator is not None
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        begin, cpu = time.monotonic(), time.process_time()
        pl_module.whole_draft()  # makes the evaluator's drafter up to date
        with isolate_rng():
            found = with_total(_reduce(trainer, self._evaluator.by_domain()))
        figures = self._figures(found)
        first = not self.history
        self.history.append({"step": float(trainer.global_step), **figures})
        for name, value in figures.items():
            # The same on every rank already: they were made from reduced sums.
            trainer.callback_metrics[name] = torch.tensor(value)
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=trainer.global_step)
        if trainer.is_global_zero:
            self._print(trainer, found, first=first)
        self._tell(trainer, pl_module, figures)
        seconds = time.monotonic() - begin
        self.seconds += seconds
        self.cpu_seconds += time.process_time() - cpu
        pl_module.step_log.throughput.leave_out(seconds)

    def _figures(self, found: dict[str, ExpectedRounds]) -> dict[str, float]:
        """What is logged, always under the same names."""
        *domains, total = found
        figures = {f"{self.prefix}tau": found[total].tau}
        if domains:
            figures |= {f"{self.prefix}tau/{domain}": found[domain].tau for domain in domains}
        for slot, share in enumerate(found[total].conditional_acceptance, start=1):
            figures[f"{self.prefix}acceptance/slot_{slot}"] = share
        return figures

    def _print(self, trainer: Trainer, found: dict[str, ExpectedRounds], *, first: bool) -> None:
        *domains, total = found
        parts = ", ".join(f"{domain} {found[domain].tau:.3f}" for domain in domains)
        count = f" ({found[total].committed} tokens of {found[total].responses} responses)" if first else ""
        print_line(f"expected tau, step {trainer.global_step}: {found[total].tau:.3f}{parts and f' ({parts})'}{count}")
        if first and (warning := foreign_warning(found[total].own_share)) is not None:
            print_line(warning)

    def _tell(self, trainer: Trainer, module: DraftModule, figures: dict[str, float]) -> None:
        """Let those who follow one of the figures look at it, as after a validation."""
        if trainer.global_step == 0:
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ModelCheckpoint | EarlyStopping) and callback.monitor in figures:
                callback.on_validation_end(trainer, module)

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = state_dict["history"]


def _reduce(trainer: Trainer, found: dict[str, ExpectedRounds]) -> dict[str, ExpectedRounds]:
    """Sums over ranks, in one vector; every rank calls this, with or without texts of its own."""
    packed = [one.pack() for one in found.values()]
    total = torch.cat(packed).to(trainer.strategy.root_device)
    if trainer.world_size > 1:
        torch.distributed.all_reduce(total)
    parts = total.cpu().split([len(one) for one in packed])
    return {
        domain: ExpectedRounds.unpack(one.num_drafts, part)
        for (domain, one), part in zip(found.items(), parts, strict=True)
    }
