"""SGLang's DFLASH worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Qwen3Config

from dflash_lightning.draft_config import NESTED, DraftConfig
from dflash_lightning.export.base import ExportFacts
from dflash_lightning.export.conventions import Conventions
from dflash_lightning.export.qwen3_layout import Qwen3Layout, ascending, conventions_of, required
from dflash_lightning.target.served import SERVERS_READ


class SGLangExporter(Qwen3Layout):
    """Nested settings win over flat ones. Layer ids are 0-based; SGLang itself captures in front of layer ``id + 1``.

    It skips tensors whose names it does not know without a word, so a prefix would leave random weights.
    """

    name = "sglang"
    consumer = "SGLang"
    read_in = "sglang 0.5.23 (srt/models/dflash.py, srt/speculative/dflash_utils.py)"
    holds = ("DFlash", "LiLiCorr", "LiLiCorr with convolutions")
    applies = SERVERS_READ
    plainly = "Send `input_ids` to `/generate` with a temperature of 0 in `sampling_params`: the default is 1."

    def limits(self, config: DraftConfig, facts: ExportFacts | None = None) -> list[str]:
        return super().limits(config, facts) + ascending(config, self.consumer)

    def read_layout(self, cfg: Qwen3Config, raw: Mapping[str, Any]) -> Conventions:
        settings = {**raw, **(raw.get(NESTED) or {})}
        ids = tuple(required(settings, "target_layer_ids", "target_layer_ids"))
        depth = settings.get("num_target_layers")
        if depth is not None and max(ids) >= depth:
            raise ValueError(f"target_layer_ids: {list(ids)} is out of range for num_target_layers {depth}.")
        return conventions_of(
            cfg,
            layer_ids=ids,
            block_size=int(settings.get("block_size", 16)),
            mask_token_id=required(settings, "mask_token_id", "mask_token_id"),
            is_causal=raw.get("is_causal"),
        )

    def serve_command(self, draft_config: DraftConfig, facts: ExportFacts, *, target: str, folder: str) -> str:
        # The number of draft tokens is the verify window here: the whole block, anchor included.
        return (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
            f"--speculative-draft-model-path {folder} --speculative-num-draft-tokens {draft_config.block_size}"
            + (" --sampling-defaults openai" if self.applied(facts.served) else "")
        )
