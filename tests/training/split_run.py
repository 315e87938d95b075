"""The same small run in one, two and four processes, under DDP and sharded; run as a script by ``test_split.py``."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_lightning.callbacks import AtomicCheckpointIO, ExpectedTau, SpeculativeEval
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import MarkovHead
from dflash_lightning.loss import CrossEntropy
from dflash_lightning.module import OptimSettings
from dflash_lightning.target import FrozenTarget
from dflash_lightning.training.guard import Diverged
from dflash_lightning.training.sharded import ShardedStrategy

# Unequal documents, four per optimizer step; the last step of an epoch has three, so that one rank of four has none.
LENGTHS = [20, 9, 14, 30, 12, 25, 17]
EPOCHS, SECONDS = 3, 120
STEPS = 2 * EPOCHS
JOBS: dict[str, dict[str, Any]] = {
    "alone": {"devices": 1, "strategy": "auto"},
    "ddp2": {"devices": 2, "strategy": "ddp"},
    "ddp4": {"devices": 4, "strategy": "ddp"},
    "fsdp2": {"devices": 2, "strategy": "fsdp"},
    # To the end from the middle of an epoch; and from an epoch's end, where the number of processes may change.
    "fsdp2_from_fsdp2": {"devices": 2, "strategy": "fsdp", "resume": "fsdp2/step3"},
    "fsdp2_from_alone": {"devices": 2, "strategy": "fsdp", "resume": "alone/epoch1"},
    "alone_from_fsdp2": {"devices": 1, "strategy": "auto", "resume": "fsdp2/epoch1"},
    "broken": {"devices": 2, "strategy": "fsdp", "poison": True},
}


def load(name: str) -> ModuleType:
    """A neighbouring file of the tests as a module."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Recorder(Callback):
    """What is logged of every step."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.seen = 0

    def on_train_start(self, trainer, pl_module):
        self.seen = trainer.global_step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.seen < trainer.global_step:
            self.seen = trainer.global_step
            names = ("train/loss", "train/lr", "train/grad_norm", "train/accuracy")
            self.logged.append({name: float(trainer.callback_metrics[name]) for name in names})


class Keeper(Callback):
    """Keeps what the evaluation saved at the end of each epoch."""

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            folder = Path(trainer.default_root_dir)
            shutil.copy(folder / "last.ckpt", folder / f"epoch{trainer.current_epoch}.ckpt")


class Poison(Callback):
    """From the third step on, a gradient of one rank's own is no number: after the backward, so only the guard sees."""

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step == 2 and trainer.global_rank == 1:
            gradient = next(p.grad for p in pl_module.parameters() if p.grad is not None)
            gradient.to_local().fill_(float("nan"))


def train(
    folder: Path, name: str, *, devices: int, strategy: str, resume: str | None = None, poison: bool = False
) -> dict[str, Any]:
    tools = load("conftest")
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    target = FrozenTarget(model, AutoTokenizer.from_pretrained(folder / "target"), name="tiny-llama")
    rows = folder / "rows.jsonl"
    module = tools.make_module(
        target,
        drafter=BlockTransformer(num_layers=2),
        head=MarkovHead(rank=5),  # three does not divide by the ranks
        loss={"cross_entropy": CrossEntropy(decay=4.0)},
        optim=OptimSettings(lr=2e-3, warmup_steps=2),
    )
    recorder = Recorder()
    decoding = DecodingSettings(max_new_tokens=6, batch_size=2, compile=False)
    callbacks: list[Callback] = [
        ExpectedTau(str(rows), decoding=decoding, every_n_steps=3),
        SpeculativeEval(str(folder / "prompts.jsonl"), decoding=decoding, lossless_prompts=2),
        ModelCheckpoint(folder / name, filename="step{step}", auto_insert_metric_name=False, every_n_train_steps=1,
                        save_top_k=-1),
        Keeper(),
        recorder,
    ]  # fmt: skip
    trainer = tools.make_trainer(
        folder / name,
        devices=devices,
        strategy=ShardedStrategy(timeout_minutes=2) if strategy == "fsdp" else strategy,
        accumulate_grad_batches=4 // devices,
        gradient_clip_val=0.1,  # less than any norm here
        max_epochs=EPOCHS,
        enable_checkpointing=True,
        plugins=[AtomicCheckpointIO()],
        callbacks=[*callbacks, *([Poison()] if poison else [])],
    )
    checkpoint = None if resume is None else str(folder / f"{resume}.ckpt")
    stopped = ""
    try:
        trainer.fit(module, datamodule=tools.make_data(target, str(rows), packing=False), ckpt_path=checkpoint)
    except Diverged as error:
        stopped = str(error)
    figures = [{k: v for k, v in f.items() if not k.endswith(("ms", "s_per_token", "speedup"))}
               for f in callbacks[1].history]  # fmt: skip
    return {
        "logged": recorder.logged,
        "stopped": stopped,
        "steps": trainer.global_step,
        "decoding": figures,
        "expected": callbacks[0].history,
        "draft": {name: value.clone() for name, value in callbacks[1]._evaluator.draft.state_dict().items()},
        "changed": module.changed_parameters(),
        "held": sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in module.parameters()),
    }


def main(folder: Path, names: list[str]) -> None:
    ranks = load("ranks")
    rows = load("conftest").token_rows(LENGTHS)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in names:

        def work(rank: int, name: str = name) -> None:
            torch.save(train(folder, name, **JOBS[name]), folder / f"{name}-{rank}.pt")

        ranks.in_ranks(JOBS[name]["devices"], work, seconds=SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(JOBS))
