"""Small whole runs: data files, module, data module and trainer around a tiny target."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from dflash_lightning.block import Anchored
from dflash_lightning.cli import main
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.data import DraftData
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import MarginalHead
from dflash_lightning.loss import CrossEntropy
from dflash_lightning.module import DraftModule, OptimSettings
from dflash_lightning.regenerate.regenerate import regenerate
from dflash_lightning.target import FrozenTarget, load_target


def token_rows(lengths: list[int], seed: int = 0) -> list[dict[str, list[int]]]:
    """Tokenised rows of the given lengths; the first 3 tokens are a prompt. Length 4 leaves no place for a block."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        ids = torch.randint(0, 256, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "loss_mask": [0] * 3 + [1] * (length - 3)})
    return rows


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """``write_rows(lengths, seed=0)``: a data file of random tokenised rows."""

    def write(lengths: list[int], seed: int = 0, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in token_rows(lengths, seed)))
        return str(path)

    return write


def make_module(target: FrozenTarget, **overrides: Any) -> DraftModule:
    settings: dict[str, Any] = {
        "block": Anchored(block_size=4, num_anchors=4),
        "conditioning": KVInjection(target_layer_ids=[0, 2]),
        "drafter": BlockTransformer(num_layers=1),
        "head": MarginalHead(),
        "loss": {"cross_entropy": CrossEntropy(decay=4.0)},
        "optim": OptimSettings(lr=1e-2, warmup_steps=0),
        **overrides,
    }
    return DraftModule(target, **settings)


def make_data(target: FrozenTarget, path: str, **overrides: Any) -> DraftData:
    settings: dict[str, Any] = {"max_length": 32, "token_bucket": 8, "block_bucket": 4, **overrides}
    return DraftData(target, train=path, **settings)


def make_trainer(folder: Path, **overrides: Any) -> Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "default_root_dir": str(folder),
        **overrides,
    }
    return Trainer(**settings)


@pytest.fixture
def parts() -> tuple[Callable[..., DraftModule], Callable[..., DraftData], Callable[..., Trainer]]:
    """``make_module, make_data, make_trainer``."""
    return make_module, make_data, make_trainer


def weights(module: DraftModule) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.draft_model.named_parameters()}


@pytest.fixture
def weights_of() -> Callable[[DraftModule], dict[str, torch.Tensor]]:
    return weights


@pytest.fixture(scope="session", autouse=True)
def _no_pictures(blank_pictures: None) -> None:
    """For all tests of this folder; ``test_speculative_eval`` draws one of each by itself."""


class Place:
    """A folder with a tiny target, chat rows and prompts, in which the command runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def arguments(self, recipe: str, *overrides: str, name: str) -> list[str]:
        """``dflash fit`` of a shipped recipe on the tiny target; decoding is kept short."""
        return [
            recipe,
            f"target.source={self.folder / 'target'}",
            f"data.train={self.folder / 'train.jsonl'}",
            "data.cache=null",
            *([] if "callbacks=[checkpoint_last]" in overrides else self.evaluation),
            "decoding.max_new_tokens=4",
            "decoding.compile=false",
            f"run_dir={self.run(name)}",
            *overrides,
        ]

    @property
    def evaluation(self) -> list[str]:
        return [
            f"callbacks.speculative_eval.prompts={self.folder / 'prompts.jsonl'}",
            "callbacks.speculative_eval.lossless_prompts=1",
        ]

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name

    def main(self, arguments: list[str]) -> int:
        return main(arguments)

    def fit(self, recipe: str, *overrides: str, name: str, options: tuple[str, ...] = ()) -> int:
        """The exit status of the command."""
        return main(["fit", *self.arguments(recipe, *overrides, name=name), *options])

    def checkpoint(self, name: str, which: str = "last") -> dict[str, Any]:
        return torch.load(self.run(name) / "checkpoints" / f"{which}.ckpt", weights_only=True)

    def own_rows(self) -> Path:
        """Training rows that the target wrote itself, at temperature 0."""
        file = self.folder / "own.jsonl"
        if not file.exists():
            target = load_target(str(self.folder / "target"), dtype="float32")
            decoding = DecodingSettings(batch_size=4, max_new_tokens=16, compile=False)
            regenerate(self.folder / "prompts.jsonl", target, file, decoding=decoding, progress=False)
        return file

    def state(self, name: str) -> dict[str, Any]:
        return json.loads((self.run(name) / "run.json").read_text())


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory, make_tiny_model: Callable[..., Any], byte_tokenizer: Any) -> Place:
    """Eight layers and many positions, so that every shipped option fits; 12 rows, 2 prompts."""
    folder = tmp_path_factory.mktemp("place")
    make_tiny_model("llama", num_hidden_layers=8, max_position_embeddings=8192).save_pretrained(folder / "target")
    byte_tokenizer.save_pretrained(folder / "target")
    rows = [
        [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{i} {i} {i} and again {i}"}]
        for i in range(12)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"turns": [f"tell {i}"]}) + "\n" for i in range(2)))
    return Place(folder)
