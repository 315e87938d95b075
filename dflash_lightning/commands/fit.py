"""``dflash fit``: a recipe's run in its folder, from the start or from where it stopped."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Callback, LightningModule, Trainer
from omegaconf import DictConfig, OmegaConf

from dflash_lightning.callbacks import ExpectedTau, SpeculativeEval
from dflash_lightning.callbacks.run_log import describe_run
from dflash_lightning.callbacks.spent import TrainingCost
from dflash_lightning.callbacks.stopping import RunCut, Stopper, forget_time, is_finished
from dflash_lightning.commands.fit_estimate import estimate, expected_memory
from dflash_lightning.data import DraftData
from dflash_lightning.model.files import without_progress_bars
from dflash_lightning.model.memory import StepMemory
from dflash_lightning.module import DraftModule
from dflash_lightning.recipe import Parts, build_recipe, check_recipe, load_recipe
from dflash_lightning.recipe.length import LENGTHS, behind, extend_recipe
from dflash_lightning.run import RunFolder
from dflash_lightning.training.guard import Diverged
from dflash_lightning.training.out_of_memory import explained

# Lightning starts the other ranks of one machine as copies of this command: rank 0 tells them what it decided, because
# the folder no longer looks the same by then.
_RESUME = "DFLASH_RESUME_FROM"
INTERRUPTED = 130
_UNREADABLE = (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError)


def fit(
    recipe: str, overrides: Sequence[str], *, fresh: bool = False, extend: Sequence[str] = (), dry_run: bool = False
) -> int:
    """Train, resume, or say that there is nothing left to do; the exit status.

    ``extend`` gives a run a new length (``trainer.max_epochs=6``); ``dry_run`` measures a step and writes nothing.

    Raises:
        ValueError: the recipe has faults, or the run folder belongs to another run or is being written by one.
    """
    cfg = load_recipe(recipe, overrides)
    extend_recipe(cfg, extend)
    if dry_run:
        OmegaConf.update(cfg, "data.rejected", None)
        return _dry_run(cfg)
    check_recipe(cfg)
    folder = RunFolder(Path(cfg.run_dir))
    stopper = Stopper(folder.last)
    with folder.locked() if _is_first() else contextlib.nullcontext(), stopper.listening():
        return _fit(folder, cfg, fresh, stopper, _asked(folder, recipe, overrides), but=LENGTHS if extend else ())


def _dry_run(cfg: DictConfig) -> int:
    found = estimate(build_recipe(cfg))
    if found is None:
        raise ValueError("--dry-run: needs a DraftModule, a DraftData and no trainer.fast_dev_run. Leave it out.")
    _say(found.table())
    return 0


def _asked(folder: RunFolder, recipe: str, overrides: Sequence[str]) -> dict[str, Any] | None:
    """What was typed, for the run's record; null where the run itself was named, which says nothing new."""
    if Path(recipe).resolve() in (folder.path.resolve(), folder.recipe.resolve()):
        return None
    return {"recipe": recipe, "overrides": [word for word in overrides if not word.startswith("run_dir=")]}


def _fit(
    folder: RunFolder,
    cfg: DictConfig,
    fresh: bool,
    stopper: Stopper,
    asked: dict[str, Any] | None,
    but: Sequence[str] = (),
) -> int:
    resume = _decide(folder, cfg, fresh, but)
    if resume is None:
        _say(folder.nothing_to_do)
        return 0
    with contextlib.nullcontext() if _is_main() else without_progress_bars():
        parts = build_recipe(cfg)
    if _is_main():
        folder.begin(cfg, asked=asked)
        if _is_first():
            folder.remove_partial()
            if not resume:
                folder.remove_logs()
        os.environ[_RESUME] = resume
    _say(f"run folder {folder.path}" + (f", resuming from {resume}{_at_step(Path(resume))}" if resume else ""))
    if _is_main() and (expected := estimate(parts, done=(resume and _step_in(Path(resume))) or 0)) is not None:
        _say(expected.line())
    started = _run(parts, folder, resume, stopper, OmegaConf.to_container(cfg, resolve=True))
    return started if isinstance(started, _Status) else _conclude(parts, folder, started)


class _Status(int):
    """An exit status, where a run came to no end of its own."""


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


def _decide(folder: RunFolder, cfg: DictConfig, fresh: bool, but: Sequence[str] = ()) -> str | None:
    """The checkpoint to resume from, "" to start anew, null when the run is finished.

    ``but`` are keys that the recipe in the folder may have otherwise: the lengths, for a run that is made longer.
    """
    if _RESUME in os.environ and not _is_main():
        return os.environ[_RESUME]
    if fresh and not _is_main():
        raise ValueError("--fresh: ranks started from outside cannot agree on it. Remove the run folder first.")
    if fresh and (aside := folder.set_aside()) is not None:
        _say(f"the earlier run is kept as {aside}")
    folder.check_same_run(cfg, but=but)
    if but and not folder.last.exists():
        raise ValueError(
            f"--extend: {folder.path} holds no run to go on with ({folder.last} is missing). Leave it out."
        )
    longer = bool(but) and folder.is_longer(cfg, but)
    if folder.finished and not longer:
        return None
    if longer and (fault := behind(cfg, *_made(folder.last))) is not None:
        raise ValueError(f"--extend {fault}")
    return str(folder.last) if folder.last.exists() else ""


def _step_in(checkpoint: Path) -> int | None:
    """The optimizer step that a checkpoint holds, without reading its tensors; null where it cannot be read.

    What is wrong with a damaged one is said by the trainer, which must read it whole.
    """
    try:
        found = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)
        return int(found["global_step"])
    except _UNREADABLE:
        return None


def _made(checkpoint: Path) -> tuple[int, int]:
    """Optimizer steps and whole epochs that a checkpoint holds; zeros where that cannot be read."""
    try:
        found = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)
        return int(found["global_step"]), int(found["DraftData"]["train"]["epoch"])
    except _UNREADABLE:
        return 0, 0


def _at_step(checkpoint: Path) -> str:
    step = _step_in(checkpoint)
    return "" if step is None else f" (step {step})"


class _Start(Callback):
    """Says what training will hold in memory; notes the optimizer step it begins at, null when none is left to make."""

    def __init__(self, recipe: Any) -> None:
        self.recipe = recipe
        self.step: int | None = None
        self.memory: StepMemory | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        forget_time(trainer)
        describe_run(trainer, self.recipe)
        data = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(pl_module, DraftModule) and isinstance(data, DraftData):
            self.memory = expected_memory(pl_module, data, trainer)
            _say(self.memory.line())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.step = trainer.global_step


def _run(parts: Parts, folder: RunFolder, resume: str, stopper: Stopper, recipe: Any) -> int:
    """Fit; the optimizer step it started from, or the exit status of a run that was cut or diverged.

    Raises:
        ValueError: Lightning refuses the trainer's settings for this run, or the memory is at its end.
    """
    begin, cost = _Start(recipe), TrainingCost()
    callbacks: list[Callback] = parts.trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:0] = [begin, cost]
    callbacks.append(stopper)
    if not any(isinstance(callback, SpeculativeEval) for callback in callbacks):
        _say(f"no callback evaluates: tau is not measured, and {folder.last} is the checkpoint to use")
    clock = time.monotonic()
    try:
        with explained(lambda: begin.memory):
            parts.trainer.fit(parts.module, datamodule=parts.data, ckpt_path=resume or None)
    except MisconfigurationException as error:
        raise ValueError(f"trainer: {error}") from error
    except Diverged as error:
        return _report_divergence(error, folder)
    except (RunCut, KeyboardInterrupt, SystemExit):  # Lightning ends the process on Ctrl-C
        return _report_cut(parts.trainer, folder, stopper)
    finally:
        if _is_main():
            evaluation = sum(c.seconds for c in callbacks if isinstance(c, SpeculativeEval | ExpectedTau)) / 60
            folder.add_minutes(train=(time.monotonic() - clock) / 60 - evaluation, evaluation=evaluation)
            folder.note(training=cost.seconds)
    if not is_finished(parts.trainer):
        return _report_cut(parts.trainer, folder, stopper)
    return parts.trainer.global_step if begin.step is None else begin.step


def _report_cut(trainer: Trainer, folder: RunFolder, stopper: Stopper) -> _Status:
    """Say where the run stands, as the file has it.

    A rank that Lightning has started ends with 0 where all have agreed to end: a failure would have rank 0 killed
    before it has said so.
    """
    step = _step_in(folder.last) if folder.last.exists() else None
    saved = "there is no checkpoint yet" if step is None else f"{folder.last} holds step {step}"
    again = "starts again" if step is None else "goes on from there"
    why = stopper.cut or stopper.asked
    by = f" by {why}" if why else ""
    _say(f"\ninterrupted{by} at step {trainer.global_step}; {saved}. The same command {again}.", error=True)
    agreed = stopper.cut is not None and not _is_main()
    return _Status(0 if agreed else INTERRUPTED)


def _report_divergence(error: Diverged, folder: RunFolder) -> _Status:
    """Every rank has the same error; the files are those of before. Other ranks end with 0, as where a run is cut."""
    step = _step_in(folder.last) if folder.last.exists() else None
    kept = "there is none yet: the same command starts again"
    if step is not None:
        kept = f"{folder.last} holds step {step} with finite weights: the same command goes on from there"
    _say(f"dflash: {error}\n  checkpoints        {kept}", error=True)
    return _Status(1 if _is_main() else 0)


def _conclude(parts: Parts, folder: RunFolder, started: int) -> int:
    """Refuse to call a run that trained nothing a success; mark it finished otherwise."""
    problem = _problem(parts, started)
    if problem:
        _say(f"dflash: {problem}", error=True)
        return 1
    if _is_main():
        steps = parts.trainer.global_step
        metrics = parts.trainer.callback_metrics
        known = {"tau": metrics.get("decode/tau"), "loss": metrics.get("train/loss")}
        facts = {name: float(value) for name, value in known.items() if value is not None}
        rows = len(parts.data.documents) if isinstance(parts.data, DraftData) else None
        folder.finish(optimizer_steps=steps, rows=rows, **facts)
        _say(f"finished after {steps} optimizer steps{_best(parts.trainer)}. Next: {folder.next_command}")
    return 0


def _best(trainer: Trainer) -> str:
    """Which step the checkpoint that is used from now on is of, where that is not the last one."""
    evaluation = next((c for c in trainer.callbacks if isinstance(c, SpeculativeEval)), None)  # type: ignore[attr-defined]
    kept = any(getattr(c, "monitor", None) == "decode/tau" for c in trainer.checkpoint_callbacks)
    if evaluation is None or not kept or not evaluation.history:
        return ""
    best, last = max(evaluation.history, key=lambda entry: entry["decode/tau"]), evaluation.history[-1]
    if best["step"] == last["step"]:
        return ""
    return (
        f"; best.ckpt is of step {best['step']:.0f} (tau {best['decode/tau']:.2f}; the last evaluation, of last.ckpt, "
        f"found {last['decode/tau']:.2f})"
    )


def _problem(parts: Parts, started: int) -> str:
    """Why a run that came to its end is no success; empty when it is one."""
    steps = parts.trainer.global_step
    if steps == 0:
        return "the run trained nothing: no optimizer step was made. See trainer.max_epochs, max_steps and the data"
    if steps > started and parts.module.changed_parameters() == 0:
        return (
            f"the run trained nothing: {steps - started} optimizer steps changed no parameter of the drafter: "
            "see optim.lr and the loss"
        )
    return ""
