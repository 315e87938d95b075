"""z-lab's own package: ``DFlashDraftModel.from_pretrained`` and its ``spec_generate``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Qwen3Config

from dflash_lightning.draft_config import NESTED, DraftConfig
from dflash_lightning.export.base import ExportFacts, last_layer
from dflash_lightning.export.conventions import ACTIVATIONS, Conventions
from dflash_lightning.export.qwen3_layout import Qwen3Layout, conventions_of, required


class ZLabExporter(Qwen3Layout):
    """Nested settings win over flat ones; ``is_causal`` null goes by layer type."""

    name = "zlab"
    consumer = "z-lab's dflash"
    read_in = "dflash 0.1.0 (model.py)"
    holds = ("DFlash", "DFlash 2")
    applies = ()
    plainly = "Its loop reads no generation_config and is greedy unless a temperature is given."
    activations = tuple(ACTIVATIONS)

    def limits(self, config: DraftConfig, facts: ExportFacts | None = None) -> list[str]:
        return super().limits(config, facts) + last_layer(config, self.consumer)

    def read_layout(self, cfg: Qwen3Config, raw: Mapping[str, Any]) -> Conventions:
        settings = {**raw, **(raw.get(NESTED) or {})}
        required(raw, "num_target_layers", "num_target_layers at the top level")
        return conventions_of(
            cfg,
            layer_ids=tuple(required(settings, "target_layer_ids", "target_layer_ids")),
            block_size=int(settings.get("block_size", 16)),
            mask_token_id=required(settings, "mask_token_id", "mask_token_id"),
            is_causal=raw.get("is_causal"),
            embedding_scale=float(settings.get("input_embedding_scale", 1.0)),
        )

    def serve_command(self, draft_config: DraftConfig, facts: ExportFacts, *, target: str, folder: str) -> str:
        return f'dflash generate transformers --model {target} --draft {folder} "Write a haiku about caches."'
