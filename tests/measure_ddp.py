"""Blocks per second of training in one process and in two, one thread each.

    OMP_NUM_THREADS=1 python tests/measure_ddp.py [--repeat 2] [--steps 12]

A random target of a mid shape, features on the fly, every process the same number of documents per optimizer step. The
processes share two cores with whatever else runs there, so CPU-seconds per block stand beside: their ratio says what
the second process costs in work, the blocks per second what it brings on this machine as it was.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

import torch
from lightning.pytorch import Callback
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.module import OptimSettings
from dflash_lightning.target import FrozenTarget

sys.path.insert(0, str(Path(__file__).parent / "training"))  # helpers of the training tests
VOCABULARY, WIDTH, LENGTH, WARM_UP = 16384, 384, 384, 3


class Clock(Callback):
    """Wall and CPU seconds and blocks after the first steps."""

    def __init__(self) -> None:
        self.blocks, self.began, self.spent = 0, (0.0, 0.0), (0.0, 0.0)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        now = (time.monotonic(), time.process_time())
        if trainer.global_step > WARM_UP:
            self.blocks += int(batch.layout.keep.sum())
        else:
            self.began = now
        self.spent = (now[0] - self.began[0], now[1] - self.began[1])


def train(folder: Path, rank: int, world: int, steps: int) -> None:
    tools = import_module("conftest")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, eos_token_id=0, bos_token_id=1,
    )  # fmt: skip
    target = FrozenTarget(LlamaForCausalLM(config), name="random")
    module = tools.make_module(
        target,
        block=Anchored(block_size=16, num_anchors=32, mask_token_id=VOCABULARY - 1),
        conditioning=KVInjection(target_layer_ids=[1, 3, 5]),
        drafter=BlockTransformer(num_layers=3),
        optim=OptimSettings(lr=1e-4),
    )
    clock = Clock()
    trainer = tools.make_trainer(
        folder / f"{world}", devices=world, strategy="ddp" if world > 1 else "auto", max_epochs=1, callbacks=[clock]
    )
    data = tools.make_data(
        target, str(folder / f"rows{world}.jsonl"), max_length=LENGTH, packing=False, token_bucket=64, block_bucket=16
    )
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == steps, (trainer.global_step, steps)
    (folder / f"{world}-{rank}.json").write_text(json.dumps([clock.blocks, *clock.spent]))


def measure(world: int, steps: int) -> tuple[float, float]:
    """Blocks per second and CPU-milliseconds per block of ``world`` processes."""
    tools = import_module("conftest")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = tools.token_rows([LENGTH] * (steps * world))
        (folder / f"rows{world}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

        def work(rank: int) -> None:
            torch.set_num_threads(1)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            train(folder, rank, world, steps)

        import_module("ranks").in_ranks(world, work, seconds=900)
        found = [json.loads((folder / f"{world}-{rank}.json").read_text()) for rank in range(world)]
    blocks, wall, cpu = (sum(part) for part in zip(*found, strict=True))
    return blocks / (wall / world), 1000 * cpu / blocks


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    for _ in range(arguments.repeat):
        (one, cost), (two, both) = (measure(world, arguments.steps) for world in (1, 2))
        print(
            f"blocks per second: one process {one:.1f}, two {two:.1f}: {two / one:.2f}x; CPU-ms per block {cost:.1f} "
            f"and {both:.1f}: {both / cost:.2f}x",
            flush=True,
        )


if __name__ == "__main__":
    main()
