"""Seconds of a training step with the next batch's features made beside it, and with those of every batch in turn.

    python tests/measure_prefetch.py [--device cuda] [--steps 30] [--width 1024] [--layers 16] [--length 2048]

A random target and a drafter of three layers (``data.prefetch_features`` true and false), both ways one after the
other, ``--turns`` times. Ends with 1 where their losses differ by more than rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch
from lightning.pytorch import Callback
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.device import peak_bytes, wait
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.module import OptimSettings
from dflash_lightning.target import FrozenTarget

sys.path.insert(0, str(Path(__file__).parent / "training"))  # helpers of the training tests
WARM_UP = 5  # steps that are not counted: kernels are compiled in them
ROUNDING = 1e-2  # of a loss in bfloat16, after some steps


class Steps(Callback):
    """Losses, left on the device, and seconds after the first steps."""

    def __init__(self) -> None:
        self.losses, self.began, self.seconds = [], 0.0, 0.0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].detach())
        if len(self.losses) == WARM_UP:
            wait(pl_module.device)
            self.began = time.monotonic()

    def on_train_end(self, trainer, pl_module):
        wait(pl_module.device)
        self.seconds = time.monotonic() - self.began


def train(folder: Path, words: argparse.Namespace, *, ahead: bool) -> tuple[float, list[float]]:
    """Seconds of a step, and every loss."""
    tools, width = import_module("conftest"), words.width
    torch.manual_seed(0)
    on_cpu = words.device == "cpu"
    config = LlamaConfig(
        vocab_size=words.vocabulary, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=words.layers,
        num_attention_heads=width // 64, num_key_value_heads=max(1, width // 256), head_dim=64,
        max_position_embeddings=words.length, eos_token_id=0, bos_token_id=1,
        dtype=torch.float32 if on_cpu else torch.bfloat16,
    )  # fmt: skip
    target = FrozenTarget(LlamaForCausalLM(config).to(config.dtype), name="random")
    module = tools.make_module(
        target,
        block=Anchored(block_size=16, num_anchors=words.anchors, mask_token_id=words.vocabulary - 1),
        conditioning=KVInjection(num_features=min(5, words.layers - 3)),
        drafter=BlockTransformer(num_layers=3),
        optim=OptimSettings(lr=1e-4),
    )
    steps = Steps()
    trainer = tools.make_trainer(
        folder, accelerator=words.device, precision="32-true" if on_cpu else "bf16-mixed", callbacks=[steps],
        log_every_n_steps=10_000,
    )  # fmt: skip
    data = tools.make_data(
        target, str(folder / "rows.jsonl"), max_length=words.length, packing=False, token_bucket=64, block_bucket=16,
        prefetch_features=ahead,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    return steps.seconds / words.steps, torch.stack(steps.losses).tolist()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    for name, size in (("steps", 30), ("turns", 2), ("width", 1024), ("layers", 16), ("length", 2048)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--anchors", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=32768)
    words = parser.parse_args(arguments)
    tools, alike = import_module("conftest"), True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = tools.token_rows([words.length] * (words.steps + WARM_UP))
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for turn in range(words.turns):
            (one, losses), (two, others) = (train(folder, words, ahead=ahead) for ahead in (False, True))
            worst = max(abs(a - b) / abs(a) for a, b in zip(losses, others, strict=True))
            alike = alike and worst <= ROUNDING
            print(
                f"turn {turn + 1}: a step takes {1000 * one:.2f} ms with features in turn, {1000 * two:.2f} ms with "
                f"those of the next batch beside it: {two / one:.3f}x; losses differ by {worst:.1e} at the most",
                flush=True,
            )
    if (peak := peak_bytes(torch.device(words.device))) is not None:
        print(f"peak memory of all: {peak / 2**30:.2f} GiB")
    print("losses are equal to rounding" if alike else f"FAILED: losses differ by more than {ROUNDING}")
    return 0 if alike else 1


if __name__ == "__main__":
    sys.exit(main())
