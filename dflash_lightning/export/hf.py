"""transformers itself: ``target.generate(assistant_model=...)``, with or without this package installed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_lightning.draft_config import NESTED, DraftConfig
from dflash_lightning.export.base import Exporter, ExportFacts, last_layer
from dflash_lightning.export.conventions import ACTIVATIONS, Conventions
from dflash_lightning.export.qwen3_layout import conventions_of
from dflash_lightning.model.config import check_config
from dflash_lightning.types import LABEL_LAYOUTS

MODELING = "modeling_dflash_lightning"
SOURCE = Path(__file__).with_name(f"{MODELING}.py")


class HFExporter(Exporter):
    """Our own configuration, and one self-contained modelling file for ``trust_remote_code=True``.

    Where ``dflash_lightning.model`` is imported its own class is used and no remote code runs.
    """

    name = "hf"
    consumer = "transformers' generate()"
    read_in = "transformers 5.24.0 (generation/candidate_generator.py)"
    language = "python"
    plainly = (
        "`generate()` fills whatever it is not told from the target's `generation_config`, so that this folder's own "
        "is put in its place: greedy, with the target's stop tokens and nothing else."
    )
    layouts = {"DFlash": LABEL_LAYOUTS}  # noqa: RUF012
    activations = tuple(ACTIVATIONS)
    carries = (SOURCE,)
    spellings = (
        ("block_size", f"{NESTED}.block_size"),
        ("target_layer_ids", f"{NESTED}.target_layer_ids"),
        ("mask_token_id", f"{NESTED}.mask_token_id"),
        ("num_target_layers", f"{NESTED}.num_target_layers"),
        ("rope_theta", "rope_parameters.rope_theta"),
        ("is_causal",),
        ("layer_types",),
        ("head_dim",),
        ("dtype",),
        ("auto_map.AutoConfig",),
        ("auto_map.AutoModel",),
    )

    def limits(self, config: DraftConfig, facts: ExportFacts | None = None) -> list[str]:
        return super().limits(config, facts) + last_layer(config, self.consumer)

    def config(self, draft_config: DraftConfig, facts: ExportFacts) -> dict[str, Any]:
        shared = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers")
        stated = draft_config.to_dict()
        for gone in ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures", "auto_map"):
            stated.pop(gone, None)
        return {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoConfig": f"{MODELING}.DFlashConfig", "AutoModel": f"{MODELING}.DFlashDraftModel"},
            **stated,
            "model_type": DraftConfig.model_type,
            "rope_theta": draft_config.geometry.rope_theta,
            "num_speculative_tokens": draft_config.alignment.num_drafts,
            "dtype": facts.dtype,
            "chat_template_kwargs": facts.chat_template_kwargs or None,
            NESTED: {name: stated[name] for name in shared},
        }

    def files(self, draft_config: DraftConfig, facts: ExportFacts) -> dict[str, str]:
        target = facts.target
        generation = {
            "speculation_type": "dflash",
            "do_sample": False,
            "bos_token_id": target.bos_token_id,
            "eos_token_id": list(target.eos_token_ids) or None,
            "pad_token_id": target.pad_token_id,
        }
        return super().files(draft_config, facts) | {"generation_config.json": json.dumps(generation, indent=2) + "\n"}

    def serve_command(self, draft_config: DraftConfig, facts: ExportFacts, *, target: str, folder: str) -> str:
        return (
            "from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, GenerationConfig\n"
            f'tokenizer = AutoTokenizer.from_pretrained("{target}")\n'
            f'target = AutoModelForCausalLM.from_pretrained("{target}", dtype="{facts.target_dtype}")\n'
            f'target.generation_config = GenerationConfig.from_pretrained("{folder}")\n'
            f'draft = AutoModel.from_pretrained("{folder}", trust_remote_code=True).to(target.device)\n'
            'inputs = tokenizer("def add(a, b):", return_tensors="pt").to(target.device)\n'
            'output = target.generate(**inputs, assistant_model=draft, speculation_type="dflash", max_new_tokens=64)\n'
            "print(tokenizer.decode(output[0]))"
        )

    def read(self, raw: Mapping[str, Any]) -> Conventions:
        cfg = DraftConfig.from_dict(dict(raw))
        check_config(cfg)
        return conventions_of(
            cfg,
            is_causal=cfg.is_causal,
            layer_ids=tuple(cfg.target_layer_ids),
            block_size=cfg.block_size,
            mask_token_id=cfg.mask_token_id,
            first_slot=cfg.alignment.first_slot,
        )
