"""Every causal language model of transformers at toy size, and what becomes of it as a target.

Run as a script it prints the table: ``python tests/target/sweep.py [family ...]``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

from dflash_lightning.decoding import SamplingSpec, SpeculativeDecoder
from dflash_lightning.target import FrozenTarget, TargetAdapter
from dflash_lightning.target.decode_check import check_decoding
from dflash_lightning.target.families import check_family, check_structure
from dflash_lightning.target.intact import run_intact
from dflash_lightning.types import FeatureSpec

FAMILIES = sorted(NAMES)
LAYERS = 4
TOLERANCE = 1e-4  # relative to the largest value
NEW_TOKENS = 12
LENGTHS = (11, 30)  # one within and one past the windows of 8
TREE_LENGTHS = ((11, 30, 5), (17, 17), (30,))  # ragged, equal, one
TREE_NODES = 9
MOST_PARAMETERS = 3e7
# Whatever of this a family's configuration has is set; experts route, windows end, latent attention is narrow.
_SIZES: dict[str, Any] = {
    **{"vocab_size": 272, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": LAYERS},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256},
    **{"initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{
        "n_embd": 64,
        "n_layer": LAYERS,
        "n_head": 4,
        "n_positions": 256,
        "d_model": 64,
        "n_layers": LAYERS,
        "n_heads": 4,
    },
    **{"sliding_window": 8, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
    **{"ffn_dim": 64, "word_embed_proj_dim": 64, "shared_expert_intermediate_size": 32, "rotary_dim": 8},
    **{"ffn_hidden_size": 64, "do_layer_norm_before": True, "keep_window_size": 8},
}
LEAVE = object()  # a setting that this family does not let one set
_ALWAYS = ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id", "bos_token_id", "eos_token_id")


@dataclass(frozen=True)
class Outcome:
    """``word`` is ok, refused, wrong or not built; ``detail`` says why."""

    word: str
    detail: str


def default_config(family: str) -> PretrainedConfig:
    """The family's configuration as transformers fills it in; a few contradict themselves until something is set."""
    return AutoConfig.for_model(family, **NEEDED.get(family, {}))


def toy_config(family: str) -> PretrainedConfig:
    """The family's configuration with toy sizes in place of its defaults."""
    default = default_config(family)
    sizes = {name: value for name, value in _SIZES.items() if name in _ALWAYS or _has(default, name)}
    if getattr(default, "sliding_window", None) is None:
        sizes.pop("sliding_window", None)
    if _has(default, "kv_lora_rank"):  # latent attention: as many keys as queries, and widths of its own
        sizes |= {"num_key_value_heads": 4}
        sizes.pop("head_dim", None)
    sizes |= SETTINGS.get(family, {})
    return AutoConfig.for_model(family, **{name: value for name, value in sizes.items() if value is not LEAVE})


def _has(config: PretrainedConfig, name: str) -> bool:
    """Whether the family has a setting of that name that can be set."""
    fixed = getattr(type(config), name, None)
    return name in config.to_dict() or (hasattr(config, name) and not (isinstance(fixed, property) and not fixed.fset))


def toy_model(config: PretrainedConfig) -> PreTrainedModel:
    """Random fp32 weights; norm gains and biases are random too, so that none is forgotten unseen."""
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.generation_config.eos_token_id = None
    return model


def judge(family: str) -> Outcome:
    """What becomes of ``family`` as a target."""
    if (reason := _refusal(lambda: check_family(default_config(family), family))) is not None:
        return Outcome("refused", reason)
    config = toy_config(family)
    if (reason := _refusal(lambda: (check_family(config, family), check_structure(config, family)))) is not None:
        return Outcome("refused", reason)
    model = toy_model(config)
    try:
        target = FrozenTarget(model, None, name=family)
        target.check()
        check_decoding(target)
    except ValueError as error:
        return Outcome("refused", f"self-check: {str(error).removeprefix('target: ').split('. ')[0]}")
    faults = [*embedding_faults(target), *feature_faults(target), *decoding_faults(target), *tree_faults(target)]
    return Outcome("wrong", "; ".join(faults)) if faults else Outcome("ok", "")


def _refusal(check: Callable[[], object]) -> str | None:
    """The reason for which ``check`` says that a family cannot be a target; null when it may."""
    try:
        check()
    except ValueError as error:
        reason = str(error).partition("cannot be a target: ")[2]
        if not reason:
            raise
        return reason.split(". ")[0]
    return None


def embedding_faults(target: FrozenTarget) -> list[str]:
    """The stated scale of the embedding against what the first layer is given, where that is rows times a number."""
    given: list[Tensor] = []

    def keep(module: object, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        given.append(args[0] if args else kwargs["hidden_states"])

    hook = target.anatomy.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    run_intact(target.model, target.anatomy.layers, _rows()[0])
    hook.remove()
    rows, found = target.embed(_rows()[0]), given[0]
    scale = float((found * rows).sum() / (rows * rows).sum())
    proportional = float((found - scale * rows).norm() / found.norm()) < TOLERANCE
    stated = target.facts.embedding_scale
    return (
        [f"the embedding is scaled by {scale}, not {stated}"] if proportional and abs(scale / stated - 1) > 1e-3 else []
    )


def feature_faults(target: FrozenTarget) -> list[str]:
    """Features against hooks on the intact model, packed rows against single ones, and what decoding reads."""
    rows = _rows()
    spec = FeatureSpec(tuple(range(target.facts.num_layers)))
    early = FeatureSpec(tuple(range(target.facts.num_layers - 1)))
    hooked = [torch.stack(run_intact(target.model, target.anatomy.layers, ids).outputs, dim=2) for ids in rows]
    positions = [torch.arange(ids.shape[1])[None] for ids in rows]
    packed = target.features(torch.cat(rows, 1), torch.cat(positions, 1), spec).hidden
    adapter = TargetAdapter(target, spec, prepacked=False)
    faults = []
    begin = 0
    for ids, place, truth in zip(rows, positions, hooked, strict=True):
        length = ids.shape[1]
        kinds = {
            "features": (target.features(ids, place, early).hidden, truth[:, :, :-1]),
            "packed features": (packed[:, begin : begin + length], truth),
            "features of decoding": (_decoded_features(adapter, ids), truth),
        }
        for kind, (found, expected) in kinds.items():
            error = float((found - expected).abs().max() / expected.abs().max())
            if not error < TOLERANCE:
                faults.append(f"{kind} of {length} tokens differ by {error:.1e}")
        begin += length
    return faults


def _decoded_features(adapter: TargetAdapter, ids: Tensor) -> Tensor:
    """Features as decoding reads them: half of the row as a prompt, the rest verified in blocks of four."""
    row, half = ids[0].tolist(), ids.shape[1] // 2
    pieces = [adapter.prefill([row[:half]])[1].hidden]
    for begin in range(half, len(row), 4):
        block = row[begin : begin + 4]
        adapter.verify(torch.tensor([block]))
        pieces.append(adapter.commit(None, torch.tensor([len(block)])).hidden)
    return torch.cat(pieces, dim=1)


def decoding_faults(target: FrozenTarget) -> list[str]:
    """Greedy decoding, one prompt at a time and in a ragged batch, against ``transformers.generate``."""
    prompts = [ids[0].tolist() for ids in _rows()]
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = [target.model.generate(ids, **settings)[0, ids.shape[1] :].tolist() for ids in _rows()]
    sampling = SamplingSpec(0.0, None, None, 0)
    decoder = SpeculativeDecoder(target, None, sampling=sampling, max_length=128, batch_size=2, compile=False)

    def decode(some: list[list[int]]) -> list[list[int]]:
        result = decoder.decode(some, max_new_tokens=NEW_TOKENS, stop_ids=())
        return [generation.output_ids for generation in result.generations]

    faults = [] if decode(prompts) == expected else ["a ragged batch is decoded otherwise than by generate"]
    if [decode([prompt])[0] for prompt in prompts] != expected:
        faults.append("single prompts are decoded otherwise than by generate")
    return faults


def tree_faults(target: FrozenTarget) -> list[str]:
    """Random trees, and a chain after one path of each, against plain forwards; in a ragged batch, an equal one, alone.

    No family of today's fails the trial at start (``tree_check``), which would refuse its trees by name.
    """
    adapter = TargetAdapter(target, FeatureSpec(tuple(range(target.facts.num_layers))), prepacked=False)
    if not adapter.trees:
        return ["its trees are refused by the trial"]
    return [fault for lengths in TREE_LENGTHS for fault in _tree_faults(adapter, target, lengths)]


def _tree_faults(adapter: TargetAdapter, target: FrozenTarget, lengths: tuple[int, ...]) -> list[str]:
    generator = torch.Generator().manual_seed(len(lengths))
    prompts = [torch.randint(5, 260, (length,), generator=generator).tolist() for length in lengths]
    tokens = torch.randint(5, 260, (len(lengths), TREE_NODES), generator=generator)
    parents = random_parents(len(lengths), TREE_NODES, generator)
    adapter.prefill(prompts)
    found = adapter.verify(tokens, parents=parents)
    errors = {"trees": 0.0, "chains after a path": 0.0, "features of a path": 0.0}
    ways = []
    for b, prompt in enumerate(prompts):
        ways.append([way_to(node, parents[b].tolist()) for node in range(TREE_NODES)])
        expected = plain_logits(target, [prompt + tokens[b, way].tolist() for way in ways[b]])
        errors["trees"] = max(errors["trees"], *map(relative, found[b], [rows[-1] for rows in expected]))
    chosen = [row[-1] for row in ways]  # the last node's
    width = max(map(len, chosen))
    path = torch.tensor([way + [0] * (width - len(way)) for way in chosen])
    features = adapter.commit(path, torch.tensor([len(way) for way in chosen]))
    chain = torch.randint(5, 260, (len(lengths), 3), generator=generator)
    found = adapter.verify(chain)
    texts = [prompt + tokens[b, chosen[b]].tolist() + chain[b].tolist() for b, prompt in enumerate(prompts)]
    fresh = TargetAdapter(target, adapter.spec, prepacked=False)
    for b, text in enumerate(texts):
        expected, begin = plain_logits(target, [text])[0][-3:], len(prompts[b])
        errors["chains after a path"] = max(errors["chains after a path"], relative(found[b], expected))
        whole, count = fresh.prefill([text])[1].hidden[0], len(chosen[b])
        error = relative(features.hidden[b, :count], whole[begin : begin + count])
        errors["features of a path"] = max(errors["features of a path"], error)
    return [f"{kind} at {lengths} differ by {error:.1e}" for kind, error in errors.items() if not error < TOLERANCE]


def random_parents(batch: int, nodes: int, generator: torch.Generator) -> Tensor:
    """Any node before a node may be its parent."""
    draws = [[0, *(int(torch.randint(0, n, (1,), generator=generator)) for n in range(1, nodes))] for _ in range(batch)]
    return torch.tensor(draws)


def way_to(node: int, parents: list[int]) -> list[int]:
    """The nodes from the root to ``node``."""
    return [*way_to(parents[node], parents), node] if node else [0]


@torch.no_grad()
def plain_logits(target: FrozenTarget, texts: list[list[int]]) -> list[Tensor]:
    """The intact model's logits at every token of every text, in one forward padded on the right."""
    longest = max(map(len, texts))
    logits = target.model(torch.tensor([text + [5] * (longest - len(text)) for text in texts]), use_cache=False).logits
    return [rows[: len(text)] for rows, text in zip(logits, texts, strict=True)]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 260, (1, length), generator=generator) for length in LENGTHS]


# What single families need besides, or instead.
SETTINGS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma4_text": {"vocab_size_per_layer_input": 272, "hidden_size_per_layer_input": 8, "global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "doge": {"keep_window_size": 48},  # a row may not be longer than that
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "phi4_multimodal": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2},
        "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 2, "num_attention_heads": 2},
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xlnet": {"max_position_embeddings": LEAVE},
}
NEEDED = {
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
}


def main(families: list[str]) -> None:
    warnings.simplefilter("ignore")
    for family in families or FAMILIES:
        try:
            outcome = judge(family)
        except Exception as error:  # the table goes on; the test does not
            outcome = Outcome("not built", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        print(f"{family:26} {outcome.word:9} {outcome.detail}".rstrip(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
