"""vLLM's ``method: dflash``, for a folder in z-lab's layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformers import Qwen3Config

from dflash_lightning.draft_config import NESTED, DraftConfig
from dflash_lightning.export.base import ExportFacts
from dflash_lightning.export.conventions import Conventions
from dflash_lightning.export.qwen3_layout import Qwen3Layout, ascending, conventions_of, required
from dflash_lightning.target.served import SERVERS_READ

# vLLM's counting: the state in front of decoder layer i, so layer i's output is number i + 1.
AUX = "eagle_aux_hidden_state_layer_ids"


PLAINLY = "Send token ids as `prompt` to `/v1/completions` with a temperature of 0: the default is 1."


def vllm_command(draft_config: DraftConfig, target: str, folder: str, *, plain: bool, method: str = "dflash") -> str:
    """The server's command line; the number of speculative tokens leaves the anchor out.

    ``plain`` switches off the sampling settings of the target's own ``generation_config.json``.
    """
    drafts = draft_config.alignment.num_drafts
    stated = json.dumps({"method": method, "model": folder, "num_speculative_tokens": drafts})
    second = len(set(draft_config.layer_types)) > 1 or draft_config.components["head"]["name"] != "marginal"
    command = f"{'VLLM_USE_V2_MODEL_RUNNER=1 ' if second else ''}vllm serve {target} --speculative-config '{stated}'"
    return command + (" --generation-config vllm" if plain else "")


class VLLMExporter(Qwen3Layout):
    """Layer ids are written twice: 0-based in ``dflash_config``, and by vLLM's own counting (+1), which wins there."""

    name = "vllm"
    consumer = "vLLM"
    read_in = "vllm 0.33.0 (model_executor/models/qwen3_dflash.py, v1/worker/gpu/spec_decode)"
    holds = ("DFlash", "DFlash 2", "LiLiCorr", "LiLiCorr with convolutions")
    applies = SERVERS_READ
    plainly = PLAINLY
    spellings = (*Qwen3Layout.spellings, (AUX,))

    def limits(self, config: DraftConfig, facts: ExportFacts | None = None) -> list[str]:
        return super().limits(config, facts) + ascending(config, self.consumer) + _candidates(config)

    def config(self, draft_config: DraftConfig, facts: ExportFacts) -> dict[str, Any]:
        stated = super().config(draft_config, facts) | {AUX: [i + 1 for i in draft_config.target_layer_ids]}
        return stated | ({"logit_scale": facts.logit_scale} if facts.logit_scale != 1.0 else {})

    def read_layout(self, cfg: Qwen3Config, raw: Mapping[str, Any]) -> Conventions:
        nested = raw.get(NESTED) or {}
        aux = raw.get(AUX) or [i + 1 for i in required(nested, "target_layer_ids", f"{NESTED}.target_layer_ids")]
        is_causal = raw.get("is_causal")
        settings = {**raw, **nested}
        return conventions_of(
            cfg,
            layer_ids=tuple(i - 1 for i in aux),
            # The block's width comes from the command line; what the file says is what the command is made of.
            block_size=int(required(settings, "block_size", "block_size")),
            mask_token_id=required(settings, "mask_token_id", "mask_token_id"),
            is_causal=nested.get("causal") if is_causal is None else is_causal,
            interleaved=not raw.get("is_neox_style", True),
        )

    def serve_command(self, draft_config: DraftConfig, facts: ExportFacts, *, target: str, folder: str) -> str:
        return vllm_command(draft_config, target, folder, plain=bool(self.applied(facts.served)))


def _candidates(config: DraftConfig) -> list[str]:
    """A limit of vLLM's walk through candidates."""
    head = config.components.get("head", {})
    count = head.get("settings", {}).get("candidates", 1)
    if head.get("name") != "lattice" or count in (1, 2, 4, 8, 16):
        return []
    return [f"its head looks at {count} candidates, and vLLM takes a power of two up to 16"]
