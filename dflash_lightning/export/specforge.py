"""SpecForge's own drafters: DFlash, Domino and DSpark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Qwen3Config

from dflash_lightning.draft_config import NESTED, DraftConfig
from dflash_lightning.export.base import ExportFacts, last_layer, plain_logits
from dflash_lightning.export.conventions import Conventions
from dflash_lightning.export.qwen3_layout import Qwen3Layout, conventions_of, required
from dflash_lightning.model.trio import trio_of
from dflash_lightning.types import LABEL_LAYOUTS

_CLASSES = {
    "DFlash": "dflash.DFlashDraftModel",
    "Domino": "domino.DominoDraftModel",
    "DSpark": "dspark.DSparkDraftModel",
}


class SpecForgeExporter(Qwen3Layout):
    """z-lab's layout with keys of Domino and DSpark in ``dflash_config``; sliding layers alone are causal in a block.

    A Markov head is held in its plain form, and all slots of its blocks predict. SpecForge names GQA and plain heads
    apart (``attention_mode``) and refuses a drafter of DSpark whose numbers of heads say otherwise.
    """

    name = "specforge"
    consumer = "SpecForge"
    read_in = "specforge 0.2.0 (modeling/draft)"
    language = "python"
    holds = ("DFlash", "Domino", "DSpark")
    layouts = {"Domino": LABEL_LAYOUTS, "DSpark": ("anchor_first",)}  # noqa: RUF012
    applies = ()
    plainly = (
        "Its loop reads no generation_config and is greedy at a temperature of 0. Of blocks that all predict it drafts "
        "one token less than the replay, and of DSpark's it takes other slots than were trained: drafts are checked by "
        "`dflash check`, not by that loop."
    )

    def limits(self, config: DraftConfig, facts: ExportFacts | None = None) -> list[str]:
        reasons = super().limits(config, facts) + last_layer(config, self.consumer)
        reasons += plain_logits(config, facts, self.consumer)
        if config.is_causal:
            reasons.append("its full-attention layers are causal, which SpecForge never is. Use --format vllm")
        elif config.is_causal is False and "sliding_attention" in config.layer_types:
            reasons.append(
                "its sliding layers are not causal in a block, which SpecForge's always are. Use --format vllm"
            )
        return reasons

    def config(self, draft_config: DraftConfig, facts: ExportFacts) -> dict[str, Any]:
        stated = super().config(draft_config, facts)
        if trio_of(draft_config) == "DSpark":
            shared = draft_config.num_key_value_heads < draft_config.num_attention_heads
            stated[NESTED]["attention_mode"] = "gqa" if shared else "mha"
        return stated

    def read_layout(self, cfg: Qwen3Config, raw: Mapping[str, Any]) -> Conventions:
        nested = raw.get(NESTED) or {}
        required(raw, "num_target_layers", "num_target_layers at the top level")
        anchored = nested.get("projector_type") == "dspark" or bool(nested.get("shift_label"))
        return conventions_of(
            cfg,
            layer_ids=tuple(required(nested, "target_layer_ids", f"{NESTED}.target_layer_ids")),
            block_size=int(required(raw, "block_size", "block_size at the top level")),
            mask_token_id=required(nested, "mask_token_id", f"{NESTED}.mask_token_id"),
            is_causal=raw.get("is_causal"),  # SpecForge reads no such key; ``limits`` refuses what it would not do
            first_slot=0 if anchored else 1,
        )

    def serve_command(self, draft_config: DraftConfig, facts: ExportFacts, *, target: str, folder: str) -> str:
        module, name = _CLASSES[trio_of(draft_config) or "DFlash"].split(".")
        return (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
            f"from specforge.modeling.draft.{module} import {name}\n"
            f'tokenizer = AutoTokenizer.from_pretrained("{target}")\n'
            f'target = AutoModelForCausalLM.from_pretrained("{target}", dtype="{facts.target_dtype}")\n'
            f'draft = {name}.from_pretrained("{folder}", dtype="{facts.target_dtype}").to(target.device)\n'
            'ids = tokenizer("def add(a, b):", return_tensors="pt").input_ids.to(target.device)\n'
            f"stop = {list(facts.target.eos_token_ids)}\n"
            "output = draft.spec_generate(target, ids, max_new_tokens=64, stop_token_ids=stop, temperature=0.0)\n"
            "print(tokenizer.decode(output[0]))"
        )
