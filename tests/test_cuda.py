"""What only a GPU runs: flex attention with gradients, mixed precision, the compiled draft step.

The runs are made on the CPU as well, with its portable attention, so that what is written here is known to work.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.data import DraftData
from dflash_lightning.decoding import SpeculativeDecoder
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import MarginalHead
from dflash_lightning.loss import CrossEntropy
from dflash_lightning.module import DraftModule, OptimSettings
from dflash_lightning.ops.block_attention import block_attention
from dflash_lightning.ops.context import KVSource
from dflash_lightning.target import FrozenTarget

pytestmark = pytest.mark.compiled
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
SHAPES = [(256, 32), (384, 64), (640, 96), (128, 160)]  # context rows, blocks


def attention_case(length: int, num_blocks: int, device: str) -> tuple[list[Tensor], Tensor]:
    """Queries, own keys and values, context keys and values in fp32, and anchors; equal on every device."""
    g = torch.Generator().manual_seed(length)
    shapes = [(2, num_blocks, 4, 4, 16), *[(2, num_blocks, 4, 2, 16)] * 2, *[(2, length, 2, 16)] * 2]
    inputs = [torch.randn(shape, generator=g).to(device).requires_grad_() for shape in shapes]
    anchors = torch.randint(1, length, (2, num_blocks), generator=g).sort().values
    return inputs, anchors.to(device)


@needs_gpu
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, 12)])
def test_flex_attention_learns_what_the_portable_path_learns(
    causal: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients at four shapes; from the third one on nothing is compiled any more."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    for number, (length, num_blocks) in enumerate(SHAPES):
        results = []
        for device in ("cpu", "cuda"):
            inputs, anchors = attention_case(length, num_blocks, device)
            q, k_own, v_own, k, v = inputs
            source = KVSource(k, v, (anchors - 40).clamp(min=0), anchors, anchors, {})
            with torch._dynamo.config.patch(error_on_recompile=number > 1):
                out = block_attention(q, k_own, v_own, [source], causal=causal, window=window, scale=0.25)
                gradients = torch.autograd.grad((out * torch.linspace(-1, 1, 16, device=device)).sum(), inputs)
            results.append([x.cpu() for x in (out, *gradients)])
        for portable, flex in zip(*results, strict=True):
            torch.testing.assert_close(flex, portable, rtol=1e-2, atol=1e-2)


class LossLog(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.shapes: list[tuple[int, int]] = []
        self.devices: set[str] = set()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(trainer.callback_metrics["train/loss"]))
        self.shapes.append((batch.input_ids.shape[1], batch.layout.anchors.shape[1]))
        self.devices.add(next(module.draft_model.parameters()).device.type)


def fit(
    target: FrozenTarget, folder: Path, *, accelerator: str, precision: Any, steps: int = 2, **data: Any
) -> tuple[Any, LossLog]:
    """Steps of two shapes in turn; the vocabulary is that of the data."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in (20, 90):
        ids = torch.randint(0, 256, (length,), generator=generator).tolist()
        rows.append(json.dumps({"input_ids": ids, "loss_mask": [0] * 3 + [1] * (length - 3)}))
    folder.mkdir()
    (folder / "rows.jsonl").write_text("\n".join(rows))
    settings = {"max_length": 96, "packing": False, "token_bucket": 16, "block_bucket": 8, **data}
    module = DraftModule(
        target,
        block=Anchored(block_size=4, num_anchors=24),
        conditioning=KVInjection(target_layer_ids=[0, 2]),
        drafter=BlockTransformer(num_layers=2, head_dim=16),
        head=MarginalHead(),
        loss={"cross_entropy": CrossEntropy(decay=4.0)},
        optim=OptimSettings(lr=1e-3, warmup_steps=0),
        draft_vocabulary="data",
    )
    log = LossLog()
    trainer = Trainer(
        accelerator=accelerator, devices=1, precision=precision, max_steps=steps, callbacks=[log], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        use_distributed_sampler=False, default_root_dir=str(folder),
    )  # fmt: skip
    trainer.fit(module, datamodule=DraftData(target, train=str(folder / "rows.jsonl"), **settings))
    return module, log


@pytest.mark.parametrize("cache_features", [None, "ram"])
@pytest.mark.parametrize("device", DEVICES)
def test_two_mixed_precision_steps_of_two_shapes_and_a_compiled_evaluation(
    device: str, cache_features: str | None, make_target: Any, tmp_path: Path
) -> None:
    _, reference = fit(make_target("qwen3"), tmp_path / "reference", accelerator="cpu", precision="32-true")
    target = make_target("qwen3")
    module, log = fit(
        target, tmp_path / device, accelerator=device, precision="bf16-mixed", cache_features=cache_features
    )
    assert log.devices == {device} and target.device.type == device
    assert log.shapes == reference.shapes and len(set(log.shapes)) == 2
    assert log.losses == pytest.approx(reference.losses, rel=2e-2)
    draft = module.draft_model
    assert draft.config.draft_vocab_size is not None and draft.config.draft_vocab_size < 256

    prompts, settings = [[5, 9, 3, 200, 17], [44]], {"max_new_tokens": 12, "stop_ids": ()}
    plain = SpeculativeDecoder(target, None, max_length=64, batch_size=2).decode(prompts, **settings)
    decoder = SpeculativeDecoder(target, draft, max_length=64, batch_size=2, compile=True)
    for _ in range(2):
        result = decoder.decode(prompts, **settings)
        assert [g.output_ids for g in result.generations] == [g.output_ids for g in plain.generations]
        assert result.stats.compiled and decoder.compile_count == 2


@pytest.mark.parametrize("device", DEVICES)
def test_the_next_batch_beside_the_step_teaches_the_same(device: str, make_target: Any, tmp_path: Path) -> None:
    """On a GPU its features are made in a second stream; steps of two shapes, so that memory changes hands."""
    ways = (False, device == "cuda" or "auto")
    in_turn, beside = (
        fit(make_target("qwen3"), tmp_path / str(way), accelerator=device, precision="32-true", steps=6,
            prefetch_features=way)[1]
        for way in ways
    )  # fmt: skip
    assert len(in_turn.losses) == 6 and in_turn.shapes == beside.shapes
    assert beside.losses == pytest.approx(in_turn.losses, rel=1e-4)
