"""``dflash fit``: a recipe's run in its folder, from the start or from where it stopped."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Callback, LightningModule, Trainer
from omegaconf import DictConfig

from dflash_lightning.callbacks import SpeculativeEval
from dflash_lightning.data import DraftData
from dflash_lightning.model_files import without_progress_bars
from dflash_lightning.model_memory import memory_line
from dflash_lightning.module import DraftModule
from dflash_lightning.recipe import Parts, build_recipe, check_recipe, load_recipe
from dflash_lightning.run import RunFolder

# Lightning starts the other ranks of one machine as copies of this command: rank 0 tells them what it decided, because
# the folder no longer looks the same by then.
_RESUME = "DFLASH_RESUME_FROM"
INTERRUPTED = 130


def fit(recipe: str, overrides: Sequence[str], *, fresh: bool = False) -> int:
    """Train, resume, or say that there is nothing left to do; the exit status.

    Raises:
        ValueError: the recipe has faults, or the run folder belongs to another run or is being written by one.
    """
    cfg = load_recipe(recipe, overrides)
    check_recipe(cfg)
    folder = RunFolder(Path(cfg.run_dir))
    with folder.locked() if _is_first() else contextlib.nullcontext():
        return _fit(folder, cfg, fresh)


def _fit(folder: RunFolder, cfg: DictConfig, fresh: bool) -> int:
    resume = _decide(folder, cfg, fresh)
    if resume is None:
        _say(folder.nothing_to_do)
        return 0
    with contextlib.nullcontext() if _is_main() else without_progress_bars():
        parts = build_recipe(cfg)
    if _is_main():
        folder.begin(cfg)
        if _is_first():
            folder.remove_partial()
        os.environ[_RESUME] = resume
    _say(f"run folder {folder.path}" + (f", resuming from {resume}" if resume else ""))
    started = _run(parts, folder, resume)
    return INTERRUPTED if started is None else _conclude(parts, folder, started)


def _is_main() -> bool:
    """Whether this process is rank 0 (or the only one), also before Lightning has started the others."""
    return rank_zero_only.rank == 0  # type: ignore[attr-defined]


def _is_first() -> bool:
    """Whether this is the one process of a run that locks its folder.

    The first process of a further machine does not know its rank before Lightning has started, but its node's.
    """
    return _is_main() and os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0")) == "0"


def _say(text: str, *, error: bool = False) -> None:
    """Print once, however many ranks there are."""
    if _is_main():
        print(text, file=sys.stderr if error else sys.stdout, flush=True)


def _decide(folder: RunFolder, cfg: DictConfig, fresh: bool) -> str | None:
    """The checkpoint to resume from, "" to start anew, null when the run is finished."""
    if _RESUME in os.environ and not _is_main():
        return os.environ[_RESUME]
    if fresh and not _is_main():
        raise ValueError("--fresh: ranks started from outside cannot agree on it. Remove the run folder first.")
    if fresh and (aside := folder.set_aside()) is not None:
        _say(f"the earlier run is kept as {aside}")
    folder.check_same_run(cfg)
    if folder.finished:
        return None
    return str(folder.last) if folder.last.exists() else ""


class _Start(Callback):
    """Says what training will hold in memory; notes the optimizer step it begins at, null when none is left to make."""

    step: int | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(pl_module, DraftModule) and isinstance(data, DraftData):
            tokens = data.rows_per_batch * (data.row_tokens if data.packing else data.max_length)
            _say(memory_line(pl_module.target, pl_module.draft_model, pl_module.required(), tokens))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.step = trainer.global_step


def _run(parts: Parts, folder: RunFolder, resume: str) -> int | None:
    """Fit; the optimizer step it started from, or null when it was interrupted.

    Raises:
        ValueError: Lightning refuses the trainer's settings for this run.
    """
    begin = _Start()
    parts.trainer.callbacks.insert(0, begin)  # type: ignore[attr-defined]
    clock = time.monotonic()
    try:
        parts.trainer.fit(parts.module, datamodule=parts.data, ckpt_path=resume or None)
    except MisconfigurationException as error:
        raise ValueError(f"trainer: {error}") from error
    except (KeyboardInterrupt, SystemExit):  # Lightning ends the process on Ctrl-C and on SIGTERM
        saved = f"{folder.last} is kept" if folder.last.exists() else "there is no checkpoint yet"
        again = "goes on from there" if folder.last.exists() else "starts again"
        _say(f"\ninterrupted at step {parts.trainer.global_step}; {saved}. The same command {again}.", error=True)
        return None
    finally:
        if _is_main():
            evaluations = [c for c in parts.trainer.callbacks if isinstance(c, SpeculativeEval)]  # type: ignore[attr-defined]
            evaluation = sum(c.seconds for c in evaluations) / 60
            folder.add_minutes(train=(time.monotonic() - clock) / 60 - evaluation, evaluation=evaluation)
    return parts.trainer.global_step if begin.step is None else begin.step


def _conclude(parts: Parts, folder: RunFolder, started: int) -> int:
    """Refuse to call a run that trained nothing, or that diverged, a success; mark it finished otherwise."""
    problem = _problem(parts, started)
    if problem:
        _say(f"dflash: {problem}", error=True)
        return 1
    if _is_main():
        steps = parts.trainer.global_step
        tau = parts.trainer.callback_metrics.get("decode/tau")
        facts = {} if tau is None else {"tau": float(tau)}
        folder.finish(optimizer_steps=steps, **facts)
        _say(f"finished after {steps} optimizer steps. Next: {folder.next_command}")
    return 0


def _problem(parts: Parts, started: int) -> str:
    """Why a run that came to its end is no success; empty when it is one."""
    steps = parts.trainer.global_step
    if steps == 0:
        return "the run trained nothing: no optimizer step was made. See trainer.max_epochs, max_steps and the data"
    parameters = dict(parts.module.draft_model.named_parameters())
    broken = [name for name, value in parameters.items() if not torch.isfinite(value).all()]
    if broken:
        return (
            f"the run diverged: {len(broken)} of {len(parameters)} parameters of the drafter hold NaN or infinity "
            f"({broken[0]} is the first). Start anew (--fresh) with a lower optim.lr, a longer warm-up "
            "(optim.warmup_fraction), or trainer.precision=32-true"
        )
    if steps > started and parts.module.changed_parameters() == 0:
        return (
            f"the run trained nothing: {steps - started} optimizer steps changed no parameter of the drafter: "
            "see optim.lr and the loss"
        )
    return ""
