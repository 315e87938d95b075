"""The format of the ``speculators`` library, which vLLM reads too: DFlash, DSpark and xPress.

For the last two only the library's own classes were run; vLLM's method of that name takes their folders.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.export.base import Exporter, ExportFacts, plain_logits
from dflash_lightning.export.conventions import Conventions
from dflash_lightning.export.parts import Parts
from dflash_lightning.export.qwen3_layout import ascending, conventions_of, identity, required, transformer_settings
from dflash_lightning.export.vllm import PLAINLY, vllm_command
from dflash_lightning.model.foreign_parts import PROJECTOR, settings_of
from dflash_lightning.model.trio import trio_of
from dflash_lightning.target.served import SERVERS_READ
from dflash_lightning.types import LABEL_LAYOUTS

LAYERS = "transformer_layer_config"
HEAD = "lm_head.weight"
ALGORITHMS = {"DFlash": "dflash", "DSpark": "dspark", "xPress": "xpress"}
_SPELLED = {"dflash": "DFlash", "dspark": "DSpark", "xpress": "XPress"}  # in the names of classes


class SpeculatorsExporter(Exporter):
    """``sample_from_anchor`` says whether all slots of a block predict. xPress is held only where they do: its refiner
    counts the anchor's slot, too, which the one here does not. A Markov head is held in its plain form.

    The only format that holds a reduced vocabulary: ``d2t``, ``t2d`` and the rows of the target's head.

    ``d2t[j]`` is the distance from ``j`` to the token that row ``j`` stands for; ``t2d`` marks the tokens that have a
    row. Layer ids count states, not layers: id ``i`` is written ``i + 1``. All layers are read alike by vLLM: with
    ``sliding_window_non_causal`` false, full layers turn causal too, so causal and full layers do not mix.
    """

    name = "speculators"
    consumer = "speculators"
    read_in = (
        "speculators 0.9.0 (models/dflash, dspark, xpress) and vllm 0.33.0 (transformers_utils/configs/speculators)"
    )
    server = "vLLM"
    applies = SERVERS_READ
    plainly = PLAINLY
    holds = tuple(ALGORITHMS)
    layouts = {"DSpark": LABEL_LAYOUTS, "xPress": ("anchor_first",)}  # noqa: RUF012
    holds_reduced_vocabulary = True
    spellings = (
        ("speculators_model_type", "speculators_config.algorithm"),
        ("speculators_config.verifier.name_or_path",),
        ("block_size",),
        ("mask_token_id",),
        ("aux_hidden_state_layer_ids",),
        ("sliding_window_non_causal",),
        ("sample_from_anchor",),
        ("draft_vocab_size",),
        (f"{LAYERS}.rope_theta", f"{LAYERS}.rope_parameters.rope_theta"),
        (f"{LAYERS}.is_causal",),
        (f"{LAYERS}.layer_types",),
        (f"{LAYERS}.head_dim",),
        ("dtype",),
    )

    def limits(self, config: DraftConfig, facts: ExportFacts | None = None) -> list[str]:
        reasons = super().limits(config, facts) + ascending(config, "vLLM")
        if "sliding_attention" in config.layer_types:
            reasons.append(
                "speculators counts a sliding window from the block's anchor, this drafter from each slot's own "
                "position. Use --format vllm"
            )
        if config.is_causal:
            reasons.append("its full-attention layers are causal, which speculators never is. Use --format vllm")
        reasons += plain_logits(config, facts, self.consumer)
        if facts is None:
            return reasons
        if facts.head_bias and config.draft_vocab_size is not None:
            reasons.append("the target's language head has a bias, which a reduced head has no place for")
        if not facts.target.name:
            reasons.append("the target has no name, and the format must name its verifier. Give --target")
        return reasons

    def config(self, draft_config: DraftConfig, facts: ExportFacts) -> dict[str, Any]:
        reduced, algorithm = draft_config.draft_vocab_size, ALGORITHMS[trio_of(draft_config) or "DFlash"]
        own = {key: value for key, value in settings_of(draft_config).items() if key != PROJECTOR}
        method = {
            "proposal_type": "greedy",
            "speculative_tokens": draft_config.alignment.num_drafts,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        return {
            "architectures": [f"{_SPELLED[algorithm]}Speculator"],
            "speculators_model_type": algorithm,
            "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": algorithm,
                "proposal_methods": [method],
                "default_proposal_method": "greedy",
                "verifier": {"name_or_path": facts.target.name, "architectures": facts.architectures},
            },
            LAYERS: transformer_settings(draft_config, facts),
            "draft_vocab_size": draft_config.vocab_size if reduced is None else reduced,
            "block_size": draft_config.block_size,
            "aux_hidden_state_layer_ids": [i + 1 for i in draft_config.target_layer_ids],
            "mask_token_id": draft_config.mask_token_id,
            "sliding_window_non_causal": True,
            "sample_from_anchor": draft_config.label_layout == "anchor_first",
            **own,
            "target_hidden_size": draft_config.target_hidden_size,
            "num_target_layers": draft_config.num_target_layers,
            "tie_word_embeddings": False,
            "dtype": facts.dtype,
            **identity(draft_config, facts),
        }

    def tensors(self, state: Mapping[str, Tensor], draft_config: DraftConfig, facts: ExportFacts) -> dict[str, Tensor]:
        tensors = super().tensors(state, draft_config, facts)
        if facts.draft_vocab is None:
            return tensors
        assert facts.head_rows is not None
        ids = facts.draft_vocab.cpu()
        known = torch.zeros(facts.target.vocab_size, dtype=torch.bool)
        known[ids] = True
        rows = facts.head_rows.to(tensors["fc.weight"].dtype)
        return tensors | {"d2t": ids - torch.arange(len(ids)), "t2d": known, HEAD: rows}

    def read_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        kept = {name: value for name, value in tensors.items() if name not in ("d2t", "t2d", HEAD)}
        if "d2t" in tensors:
            kept["draft_vocab"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        return kept

    def read(self, raw: Mapping[str, Any]) -> Conventions:
        kind = required(raw, "speculators_model_type", "speculators_model_type")
        if kind not in ALGORITHMS.values():
            raise ValueError(f"speculators_model_type: {kind!r} is none of {[*ALGORITHMS.values()]}.")
        cfg = Qwen3Config.from_dict(dict(required(raw, LAYERS, LAYERS)))
        is_causal = raw[LAYERS].get("is_causal")
        if is_causal is None:
            is_causal = not raw.get("sliding_window_non_causal", True)  # vLLM's reading, for full layers too
        anchored = raw.get("sample_from_anchor", kind == "dspark")
        return conventions_of(
            cfg,
            first_slot=0 if anchored else 1,
            draft_vocab_size=raw.get("draft_vocab_size"),
            parts=Parts() if kind == "dflash" else Parts.read({**raw, PROJECTOR: kind}),
            layer_ids=tuple(i - 1 for i in required(raw, "aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")),
            block_size=int(required(raw, "block_size", "block_size")),
            mask_token_id=required(raw, "mask_token_id", "mask_token_id"),
            is_causal=is_causal,
        )

    def serve_command(self, draft_config: DraftConfig, facts: ExportFacts, *, target: str, folder: str) -> str:
        method = ALGORITHMS[trio_of(draft_config) or "DFlash"]
        return vllm_command(draft_config, target, folder, plain=bool(self.applied(facts.served)), method=method)
