"""What ``dflash smoke`` does with one recipe, stage by stage, through the functions that the other commands use."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from dflash_lightning.commands.report_decoding import decode_for_report
from dflash_lightning.commands.smoke_law import hold_to_law
from dflash_lightning.commands.smoke_toy import CUT, STEPS, ToyWorld, toy_recipe
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.choice import choose_strategies
from dflash_lightning.decoding.evaluation import Evaluator
from dflash_lightning.export import FORMATS, Exported, check, check_format, export
from dflash_lightning.model import DraftModel
from dflash_lightning.model.found import find_weights
from dflash_lightning.recipe import Parts, build_recipe, load_recipe
from dflash_lightning.recipe.make import make
from dflash_lightning.target import FrozenTarget


class StageFailed(Exception):
    """A stage came to its end, and what it found is wrong."""


@dataclass
class Trial:
    """One recipe on its way through the stages; ``stage`` is the one that runs, or has failed.

    ``refused`` says by name what the drafter cannot do, such as an export format, and why.
    """

    recipe: str
    overrides: list[str]
    world: ToyWorld
    folder: Path
    stage: str = "compose"
    tau: float | None = None
    sampled_tau: float | None = None
    refused: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self) -> None:
        """All stages, in order.

        Raises:
            Exception: whatever a stage raises; ``stage`` is its name.
        """
        self._begin("compose")
        cfg = toy_recipe(load_recipe(self.recipe, self.overrides), self.world, self.folder / "run")
        self._begin("build")
        parts = build_recipe(cfg)
        self._begin("train")
        self._train(parts)
        draft, target = parts.module.draft_model.eval(), parts.target
        kwargs = draft.config.chat_template_kwargs
        prompts = self.world.prompt_ids(target, kwargs)
        settings: DecodingSettings = make(OmegaConf.to_container(cfg.decoding, resolve=True))
        self._begin("greedy decoding")
        self._decode_greedily(target, draft, settings, prompts)
        self._begin("sampled decoding")
        self._sample(target, draft, settings, prompts)
        self._begin("load")
        self._load(target, draft, settings, prompts)
        self._begin("resume")
        self._resume(cfg, draft)
        self._begin("export")
        self._export(target, draft, prompts)
        self._begin("done")

    def _begin(self, stage: str) -> None:
        now = time.perf_counter()
        if self.seconds:
            self.seconds[self.stage] += now
        self.stage = stage
        if stage != "done":
            self.seconds[stage] = -now

    def _train(self, parts: Parts) -> None:
        callbacks: list[Callback] = parts.trainer.callbacks  # type: ignore[attr-defined]
        callbacks.append(_SaveAt(CUT, self._checkpoint(CUT)))
        parts.trainer.fit(parts.module, datamodule=parts.data)
        if parts.trainer.global_step != STEPS:
            raise StageFailed(f"{parts.trainer.global_step} optimizer steps were made, not {STEPS}")
        if parts.module.changed_parameters() == 0:
            raise StageFailed(f"{STEPS} optimizer steps changed no parameter of the drafter")
        parts.trainer.save_checkpoint(self._checkpoint(STEPS), weights_only=False)

    def _checkpoint(self, step: int) -> Path:
        return self.folder / f"step-{step}.ckpt"

    def _decode_greedily(
        self, target: FrozenTarget, draft: DraftModel, settings: DecodingSettings, prompts: list[list[int]]
    ) -> None:
        """Against plain decoding and against ``transformers.generate``: one prompt alone, the others in a batch."""
        greedy = self._greedy(settings)
        found = decode_for_report(target, draft, prompts, greedy, timed=1)
        if found.verdict != "yes":
            which = "; ".join(map(str, [*found.evaluation.differences, *found.differences]))
            raise StageFailed(f"output is not the target's own: {which}")
        self.tau = found.evaluation.stats.tau

    def _greedy(self, settings: DecodingSettings) -> DecodingSettings:
        try:
            return dataclasses.replace(settings, temperature=0.0, top_k=None, top_p=None)
        except ValueError as error:  # parts that only sample
            self.refused["the recipe's decoding at temperature 0"] = str(error)
            return DecodingSettings(max_new_tokens=settings.max_new_tokens, batch_size=2, compile=False)

    def _sample(
        self, target: FrozenTarget, draft: DraftModel, settings: DecodingSettings, prompts: list[list[int]]
    ) -> None:
        """As the recipe samples, or at temperature 1 where it does not."""
        sampling = self._sampling(settings)
        _, verifier = choose_strategies(**sampling.strategies, sampling=sampling.sampling)
        if verifier.repeatable:  # the same noise at the same places: equal token for token
            found = Evaluator(target, draft, prompts, sampling, num_checked=len(prompts), shown=False)()
            if not found.lossless:
                raise StageFailed(f"draws are not the target's own: {'; '.join(map(str, found.differences))}")
            self.sampled_tau = found.stats.tau
            return
        law = hold_to_law(target, draft, sampling, prompts)
        if not law.passed:
            raise StageFailed(
                f"{law.tokens} tokens are not distributed as the target's own (probability {law.p_value:.1e})"
            )
        self.sampled_tau = law.tau

    def _sampling(self, settings: DecodingSettings) -> DecodingSettings:
        if settings.temperature > 0:
            return dataclasses.replace(settings, batch_size=64)
        try:
            return dataclasses.replace(settings, temperature=1.0, batch_size=64)
        except ValueError as error:  # parts that only take the likeliest token
            self.refused["the recipe's decoding at temperature 1"] = str(error)
            return DecodingSettings(temperature=1.0, batch_size=64, compile=False)

    def _load(
        self, target: FrozenTarget, draft: DraftModel, settings: DecodingSettings, prompts: list[list[int]]
    ) -> None:
        loaded = find_weights(self._checkpoint(STEPS), setting="--draft").model
        _check_equal(draft, loaded, "the loaded drafter")
        greedy = self._greedy(settings)
        if _drafts(target, loaded, greedy, prompts) != _drafts(target, draft, greedy, prompts):
            raise StageFailed("the loaded drafter proposes other tokens than the one that was saved")

    def _resume(self, cfg: DictConfig, draft: DraftModel) -> None:
        parts = build_recipe(cfg)
        parts.trainer.fit(parts.module, datamodule=parts.data, ckpt_path=self._checkpoint(CUT), weights_only=True)
        if parts.trainer.global_step != STEPS:
            raise StageFailed(f"resumed at step {CUT}, the run ended at {parts.trainer.global_step}, not at {STEPS}")
        _check_equal(draft, parts.module.draft_model, f"the drafter of the run that was resumed at step {CUT}")

    def _export(self, target: FrozenTarget, draft: DraftModel, prompts: list[list[int]]) -> None:
        for name in FORMATS:
            folder = self.folder / f"export-{name}"
            try:
                check_format(draft.config, name, "float32")
                export(draft, target, folder, format=name, dtype="float32", prompts=prompts[:2], max_new_tokens=8)
            except ValueError as error:
                if not str(error).startswith(f"--format {name} cannot hold"):
                    raise
                self.refused[name] = str(error).partition(": ")[2]
                continue
            outcome = check(Exported.open(folder), target)
            if not outcome.passed:
                raise StageFailed(f"{name}: {'; '.join(outcome.faults)}")


class _SaveAt(Callback):
    """Writes a checkpoint after one optimizer step."""

    def __init__(self, step: int, file: Path) -> None:
        self.step, self.file = step, file

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step and not self.file.exists():
            trainer.save_checkpoint(self.file, weights_only=False)


def _check_equal(draft: DraftModel, other: DraftModel, what: str) -> None:
    """Refuse another drafter than ``draft``, bit for bit."""
    ours, theirs = draft.state_dict(), other.state_dict()
    if ours.keys() != theirs.keys():
        raise StageFailed(f"{what} has other tensors: {sorted(ours.keys() ^ theirs.keys())[:4]}")
    if differing := [name for name, value in ours.items() if not _same_bits(value, theirs[name])]:
        raise StageFailed(f"{what} has other values in {len(differing)} of {len(ours)} tensors: {differing[:4]}")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())


def _drafts(
    target: FrozenTarget, draft: DraftModel, settings: DecodingSettings, prompts: list[list[int]]
) -> list[list[list[int]]]:
    """What the builder proposes in every round of decoding ``prompts``."""
    decoder = settings.make_decoder(target, draft, longest_prompt=max(map(len, prompts)), compile=False, shown=False)
    seen: list[list[list[int]]] = []
    builder: Any = decoder.parts.builder
    build = builder.build

    def listen(*arguments: Any, **named: Any) -> Any:
        made = build(*arguments, **named)
        seen.append(made.tokens.tolist())
        return made

    builder.build = listen
    try:
        decoder.decode(prompts, max_new_tokens=settings.max_new_tokens, stop_ids=target.stop_ids)
    finally:
        del builder.build  # the settings' own builder, which others decode with too
    return seen
