"""The same small run in one, two and four processes, under DDP and sharded; run as a script by ``test_split.py``."""

from __future__ import annotations

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from dflash_lightning.callbacks import AtomicCheckpointIO, ExpectedTau, SpeculativeEval
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.drafter.bound_layer import BoundLayer
from dflash_lightning.head import MarkovHead
from dflash_lightning.loss import CrossEntropy
from dflash_lightning.module import OptimSettings
from dflash_lightning.target import TargetAdapter, check_branches, load_target
from dflash_lightning.training.guard import Diverged
from dflash_lightning.training.sharded import ShardedStrategy
from dflash_lightning.types import FeatureSpec

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
    "cut": {"devices": 2, "strategy": "ddp", "cut": True},
}


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


class CountingEval(SpeculativeEval):
    """Notes how many prompts the reduced figures are of."""

    counted = 0.0

    def _log(self, trainer, module, evaluation, figures):
        self.counted = evaluation.stats.requests
        super()._log(trainer, module, evaluation, figures)


class Poison(Callback):
    """From the third step on, a gradient of one rank's own is no number: after the backward, so only the guard sees."""

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step == 2 and trainer.global_rank == 1:
            gradient = next(p.grad for p in pl_module.parameters() if p.grad is not None)
            gradient.to_local().fill_(float("nan"))


def train(
    folder: Path,
    name: str,
    *,
    devices: int,
    strategy: str,
    resume: str | None = None,
    poison: bool = False,
    cut: bool = False,
) -> dict[str, Any]:
    tools = import_module("conftest")
    target = load_target(str(folder / "target"), dtype="float32", tensor_parallel=cut)
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
    evaluation = CountingEval(str(folder / "prompts.jsonl"), decoding=decoding, lossless_prompts=2)
    callbacks: list[Callback] = [
        *([] if cut else [ExpectedTau(str(rows), decoding=decoding, every_n_steps=3)]),
        evaluation,
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
               for f in evaluation.history]  # fmt: skip
    return {
        "logged": recorder.logged,
        "stopped": stopped,
        "steps": trainer.global_step,
        "decoding": figures,
        "expected": [] if cut else callbacks[0].history,
        "prompts": evaluation.counted,
        "draft": {name: value.clone() for name, value in evaluation._evaluator.draft.state_dict().items()},
        "changed": module.changed_parameters(),
        "held": sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in module.parameters()),
    }


def compare(folder: Path, rank: int) -> dict[str, Any]:
    """What a target that is cut over two ranks differs from a whole one by."""
    source = str(folder / "target")
    plain, cut = load_target(source, dtype="float32"), load_target(source, dtype="float32", tensor_parallel=True)
    spec = FeatureSpec((0, 2), last_hidden=True)
    # Another number of rows and tokens on every rank, and two documents in a row of one of them.
    ids = torch.randint(0, 250, (2 - rank, 7 + 4 * rank), generator=torch.Generator().manual_seed(rank))
    positions = torch.cat([torch.arange(4), torch.arange(3)])[None] if rank == 0 else torch.arange(11)[None]
    positions = positions.expand(len(ids), -1)
    mine, theirs = (target.features(ids, positions, spec) for target in (cut, plain))
    layers = [cut.decoder_layer_state(1), plain.decoder_layer_state(1)]
    answers = []
    for target in (cut, plain):
        adapter, token, answer = TargetAdapter(target, FeatureSpec(), prepacked=False), [], []
        logits = adapter.prefill([[5, 9, 3], [7, 7, 8, 2, 1]])[0]
        for _ in range(8):
            token = logits.argmax(-1)[:, None]
            answer.append(token)
            logits = adapter.verify(token)[:, 0]
            adapter.commit(None, torch.ones(2, dtype=torch.long))
        answers.append(torch.cat(answer, dim=1))
    faults = {}
    for name, ask in REFUSED.items():
        try:
            ask(cut)
        except ValueError as error:
            faults[name] = str(error)
    held = sum(whole.numel() for whole in (getattr(p, "_local_tensor", p) for p in cut.model.parameters()))
    return {
        "hidden": float((mine.hidden - theirs.hidden).abs().max() / theirs.hidden.abs().max()),
        "last": float((mine.last_hidden - theirs.last_hidden).abs().max() / theirs.last_hidden.abs().max()),
        "rows": [
            torch.equal(cut.embedding_weight, plain.embedding_weight),
            torch.equal(cut.lm.weight, plain.lm.weight),
        ],
        "types": {type(tensor) for tensor in (mine.hidden, mine.last_hidden, cut.embedding_weight, cut.lm.weight)},
        "facts": cut.facts == plain.facts,
        "layer": all(torch.equal(value, layers[1][name]) for name, value in layers[0].items()),
        "answers": torch.equal(*answers),
        "faults": faults,
        "held": held / sum(p.numel() for p in plain.model.parameters()),
    }


REFUSED = {
    "keys": lambda target: target.features(torch.ones(1, 3).long(), torch.arange(3)[None], FeatureSpec(kv_ids=(0,))),
    "branches": check_branches,
    "bound layer": lambda target: BoundLayer(target, 0),
}


def main(folder: Path, names: list[str]) -> None:
    ranks = import_module("ranks")  # beside this script
    rows = import_module("conftest").token_rows(LENGTHS)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in names:

        def work(rank: int, name: str = name) -> None:
            found = train(folder, name, **JOBS[name]) if name in JOBS else compare(folder, rank)
            torch.save(found, folder / f"{name}-{rank}.pt")

        ranks.in_ranks(JOBS.get(name, {"devices": 2})["devices"], work, seconds=SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or [*JOBS, "compare"])
