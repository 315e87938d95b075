"""One epoch of a small run, cut into ranks and accumulation as asked; writes every gradient and logged number.

Run by ``test_partition.py`` in one process and, as a script, in two.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import torch
from lightning.pytorch import Callback

from dflash_lightning.callbacks import ExpectedTau, SpeculativeEval
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.loss import CrossEntropy
from dflash_lightning.target import FrozenTarget

# Unequal documents, one per micro-batch; the fifth is alone in its window, so a second rank has none there.
LENGTHS = [20, 9, 14, 30, 12]


class BlockCrossEntropy(CrossEntropy):
    """Cross entropy per block instead of per slot: a second denominator."""

    name = "block_cross_entropy"

    def denominator(self, totals):
        return totals.blocks


class Recorder(Callback):
    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.logged: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradients.append({name: p.grad.clone() for name, p in pl_module.named_parameters()})

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if len(self.logged) < len(self.gradients):
            names = [name for name in trainer.callback_metrics if name.startswith("train/")]
            self.logged.append({name: float(trainer.callback_metrics[name]) for name in names})


def load(name: str) -> ModuleType:
    """A neighbouring file of the tests as a module."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(target: FrozenTarget, folder: Path, *, devices: int, accumulate: int, prompts: str) -> dict:
    """Gradients and logged numbers of every optimizer step, and the decoding figures of the end."""
    tools = load("conftest")
    path = folder / "rows.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps(row) + "\n" for row in tools.token_rows(LENGTHS)))
    recorder = Recorder()
    evaluation = SpeculativeEval(
        prompts, decoding=DecodingSettings(max_new_tokens=8, batch_size=2, compile=False), lossless_prompts=2
    )
    expected = ExpectedTau(str(path), decoding=DecodingSettings(max_new_tokens=8), every_n_steps=1)
    loss = {"cross_entropy": CrossEntropy(decay=4.0), "blocks": BlockCrossEntropy(decay=None, coefficient=0.3)}
    module = tools.make_module(target, loss=loss)
    trainer = tools.make_trainer(
        folder,
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        accumulate_grad_batches=accumulate,
        callbacks=[recorder, evaluation, expected],
    )
    # Ranks also share one cache of features, so what they make of it together is what the target gives on the fly.
    cache = {} if devices == 1 else {"cache_features": "disk", "features_folder": str(folder / "features")}
    trainer.fit(module, datamodule=tools.make_data(target, str(path), packing=False, **cache))
    return {
        "gradients": recorder.gradients,
        "logged": recorder.logged,
        "decoding": evaluation.history,
        "expected": expected.history,
    }


if __name__ == "__main__":
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, devices, accumulate = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    frozen = FrozenTarget(model, AutoTokenizer.from_pretrained(folder / "target"), name="tiny-llama")
    result = run(frozen, folder, devices=devices, accumulate=accumulate, prompts=str(folder / "prompts.jsonl"))
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        torch.save(result, folder / "result.pt")
