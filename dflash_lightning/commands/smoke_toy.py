"""The toy world of ``dflash smoke``: a random target, rows that it wrote, and a recipe cut down to that size."""

from __future__ import annotations

import inspect
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dflash_lightning.data import load_prompts, render_prompt
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.recipe.make import locate
from dflash_lightning.recipe.tree import mapping_at, select
from dflash_lightning.regenerate.regenerate import regenerate
from dflash_lightning.target import FrozenTarget, load_target
from dflash_lightning.target.tiny import LETTERS, save_tiny_target

STEPS, CUT = 20, 10  # optimizer steps of the run, and the one after which it is resumed
_ROWS, _PROMPTS, _ANSWER = 14, 3, 32
# A number of the recipe that is larger than its toy size becomes that; a null stays null.
_AT_MOST: dict[str, int] = {
    "block.block_size": 5,
    "block.num_anchors": 8,
    "conditioning.num_features": 2,
    "drafter.num_layers": 2,
    "head.hidden_size": 16,
    "head.factor_dim": 16,
    "data.num_workers": 0,
    "data.rows_per_batch": 2,
    "decoding.max_new_tokens": 16,
    "decoding.batch_size": 3,
    "decoding.block_size": 5,
    "callbacks.*.limit": 2,
    "callbacks.*.lossless_prompts": 1,
    "trainer.accumulate_grad_batches": 2,
    "trainer.num_nodes": 1,
}
# What a recipe says for its own target, data or machine means nothing here.
_INSTEAD: dict[str, Any] = {
    "measure": None,
    "conditioning.target_layer_ids": None,
    "data.max_length": 64,
    "data.row_tokens": None,
    "data.row_blocks": None,
    "data.token_bucket": 16,
    "data.block_bucket": 8,
    "data.rejected": None,
    "data.cache": None,
    "data.cache_also": None,  # layers that its target has
    "data.limit": None,
    "optim.lr": 1e-2,
    "optim.warmup_steps": 2,
    "decoding.compile": False,
    "trainer.accelerator": "cpu",
    "trainer.devices": 1,
    "trainer.strategy": "auto",
    "trainer.precision": "32-true",
    "trainer.max_steps": STEPS,
    "trainer.max_epochs": -1,
    "trainer.max_time": None,
    "trainer.logger": False,
    "trainer.enable_progress_bar": False,
}
_SUGGESTED = {"block_size": 5, "num_layers": 1, "max_length": 64, "decay": 4.0}


@dataclass(frozen=True)
class ToyWorld:
    """A folder with a target, training rows and held-out prompts."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> ToyWorld:
        """Write the target, and let it answer prompts at temperature 1: such rows serve every loss."""
        world = cls(folder)
        save_tiny_target(world.target)
        dealer = random.Random(0)
        for file, count in ((folder / "asked.jsonl", _ROWS), (world.prompts, _PROMPTS)):
            rows = [{"turns": ["".join(dealer.choices(LETTERS, k=dealer.randint(4, 12)))]} for _ in range(count)]
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        regenerate(
            folder / "asked.jsonl",
            load_target(str(world.target), dtype="float32"),
            world.rows,
            decoding=DecodingSettings(batch_size=_ROWS, max_new_tokens=_ANSWER, temperature=1.0, compile=False),
            progress=False,
        )
        return world

    @property
    def target(self) -> Path:
        """The folder of the tiny random target."""
        return self.folder / "target"

    @property
    def rows(self) -> Path:
        """The file of training rows."""
        return self.folder / "rows.jsonl"

    @property
    def prompts(self) -> Path:
        """The file of prompts to decode."""
        return self.folder / "prompts.jsonl"

    def prompt_ids(self, target: FrozenTarget, chat_template_kwargs: dict[str, Any]) -> list[list[int]]:
        """The held-out prompts as the target's chat template renders them."""
        rows = load_prompts(str(self.prompts))
        size = target.facts.vocab_size
        return [render_prompt(target.tokenizer, row, vocab_size=size, **chat_template_kwargs) for row in rows]


def toy_recipe(cfg: DictConfig, world: ToyWorld, run_dir: Path) -> DictConfig:
    """``cfg`` on the toy target, at toy size: the same parts with a few of their numbers changed.

    Only settings that a part has are touched, so that a part of one's own need not know any of them.
    """
    node = {"_target_": "dflash_lightning.target.load_target", "source": str(world.target), "dtype": "float32"}
    OmegaConf.set_struct(cfg, False)
    cfg.target = {**node, "suggested": _SUGGESTED}
    cfg.run_dir = str(run_dir)
    if "init_from" in cfg:
        cfg.init_from = None  # a drafter of another target
    tree: Any = OmegaConf.to_container(cfg, resolve=False)
    changes: list[tuple[str, Any]] = [("data.train", str(world.rows))]
    changes += [(where, str(world.prompts)) for where, _ in select(tree, "callbacks.*.prompts")]
    changes += [("data.features_folder", str(run_dir / "features"))] if _on_disk(tree) else []
    changes += [(key, value) for key, value in _INSTEAD.items() if _name(key) in _known(tree, key)]
    for key, value in changes:
        OmegaConf.update(cfg, key, value)
    for pattern, most in _AT_MOST.items():
        for key in _keys(tree, pattern):
            number = OmegaConf.select(cfg, key, default=_known(tree, key).get(_name(key)))
            if isinstance(number, int) and number > most and not _listed(tree, key):
                OmegaConf.update(cfg, key, most)
    return cfg


def _on_disk(tree: dict[str, Any]) -> bool:
    return mapping_at(tree, "data").get("cache_features") == "disk"


def _listed(tree: dict[str, Any], key: str) -> bool:
    """Whether the recipe lists something per layer, so that their number is its own."""
    return key == "drafter.num_layers" and mapping_at(tree, "drafter").get("layer_types") is not None


def _keys(tree: dict[str, Any], pattern: str) -> list[str]:
    """The keys that a pattern such as ``callbacks.*.limit`` names, for every part that there is."""
    part, _, name = pattern.rpartition(".")
    return [f"{where}.{name}" for where, node in select(tree, part) if isinstance(node, dict)]


def _known(tree: dict[str, Any], key: str) -> dict[str, Any]:
    """Settings of the part that ``key`` belongs to, with what they are if the recipe does not say so."""
    node = mapping_at(tree, *key.split(".")[:-1])
    try:
        parameters = inspect.signature(locate(node.get("_target_"))).parameters
    except ValueError:  # the recipe's check says so
        return node
    return {**{name: parameter.default for name, parameter in parameters.items()}, **node}


def _name(key: str) -> str:
    return key.rpartition(".")[2]
