"""Facts about a target under one spelling for all families, and the digest that tells one target from another."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from dflash_lightning import layer_ids as layers
from dflash_lightning.errors import SettingError
from dflash_lightning.target.absent import are_absent
from dflash_lightning.target.families import POSITIONS, embedding_scale, length_limit, rope_settings, setting
from dflash_lightning.target.parallel import plain_values
from dflash_lightning.target.turn_end import template_stop_id
from dflash_lightning.types import TargetFacts


def check_layer_ids(layer_ids: Iterable[int], facts: TargetFacts) -> None:
    """Refuse ids that are not decoder layers of the target; see ``layer_ids.check_layer_ids``."""
    layers.check_layer_ids(layer_ids, facts.num_layers, name=facts.name)


def make_facts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    name: str,
    revision: str | None,
    stop_ids: tuple[int, ...],
) -> TargetFacts:
    """Sizes and names of a target under one spelling for all families, digest of the weights included.

    The digest is empty where a part of the weights was not read.
    """
    embedding: Any = model.get_input_embeddings()
    facts = config_facts(
        model.config, tokenizer, name=name, revision=revision, stop_ids=stop_ids, vocab_size=len(embedding.weight)
    )
    return facts if are_absent(model.modules()) else replace(facts, digest=_digest(model, facts))


def config_facts(
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    name: str,
    revision: str | None,
    stop_ids: tuple[int, ...],
    vocab_size: int,
) -> TargetFacts:
    """What the configuration of a target tells of it, before its weights are there; the digest is left empty."""
    get = setting
    num_heads, hidden_size = get(config, "num_attention_heads"), get(config, "hidden_size")
    return TargetFacts(
        name=name,
        revision=revision,
        digest="",
        model_type=config.model_type,
        vocab_size=vocab_size,
        num_tokens=0 if tokenizer is None else len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=get(config, "intermediate_size", "n_inner", default=4 * hidden_size),
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=get(config, "num_key_value_heads", default=num_heads),
        head_dim=get(config, "head_dim", default=hidden_size // num_heads),
        hidden_act=get(config, "hidden_act", "hidden_activation", "activation_function", default="silu"),
        rms_norm_eps=get(config, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", default=1e-6),
        rope_parameters=rope_settings(config),
        max_positions=max_positions(config),
        embedding_scale=embedding_scale(config),
        bos_token_id=config.bos_token_id if tokenizer is None else tokenizer.bos_token_id,
        eos_token_ids=stop_ids,
        pad_token_id=config.pad_token_id if tokenizer is None else tokenizer.pad_token_id,
    )


def _digest(model: nn.Module, facts: TargetFacts, samples: int = 16) -> str:
    """sha256 over architecture and ``samples`` evenly spaced values of each tensor (tied tensors once).

    Tensors are the parameters, and after them the buffers that are saved with the model: quantised models keep their
    weights there. A model without such buffers has the digest that it always had. Whole numbers of buffers count as
    they are. Other values are rounded to bfloat16, and below float16's normal range to 0, so that the dtype they were
    loaded in does not show when the checkpoint is a bfloat16 one (as nearly all are); a float32 one that was read as
    float16 has been rounded before, so its digest may be another. Settings that transformers renames over time stay
    out.
    """
    architecture = (facts.model_type, facts.vocab_size, facts.hidden_size, facts.num_layers, facts.num_heads)
    digest = hashlib.sha256(repr((*architecture, facts.num_kv_heads, facts.head_dim)).encode())
    for name, parameter in sorted(model.named_parameters()):
        rounded = _rounded(_sample(plain_values(parameter.detach()), samples))
        digest.update(f"{name}{tuple(parameter.shape)}".encode() + rounded.numpy().tobytes())
    for name, buffer in sorted(_saved_buffers(model)):
        values = _sample(buffer, samples)
        exact = _rounded(values) if buffer.is_floating_point() else values.long().cpu()
        digest.update(f"buffer {name}{tuple(buffer.shape)}".encode() + exact.numpy().tobytes())
    return digest.hexdigest()


def _sample(tensor: Tensor, samples: int) -> Tensor:
    """Evenly spaced values of a tensor, where it is."""
    flat = tensor.detach().reshape(-1)
    where = torch.linspace(0, len(flat) - 1, min(samples, len(flat)), dtype=torch.float64).long()
    return flat[where.to(flat.device)]


def _rounded(values: Tensor) -> Float[Tensor, " n"]:
    """To bfloat16, and below float16's normal range to 0."""
    values = values.float().cpu()
    return torch.where(values.abs() < 2.0**-14, 0.0, values).to(torch.bfloat16).float()


def _saved_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers that are part of the state_dict; the others follow from the configuration."""
    modules = model.named_modules()
    saved = {f"{at}.{n}" for at, module in modules for n in module._buffers.keys() - module._non_persistent_buffers_set}
    return [(name, buffer) for name, buffer in model.named_buffers() if name in saved or f".{name}" in saved]


def sample_rows(weight: Float[Tensor, "V H"], count: int = 4, width: int = 8) -> dict[str, list[float]]:
    """The first values of a few evenly spaced rows, by row number (a string, as JSON has it), rounded to bfloat16."""
    rows = sorted({*torch.linspace(0, len(weight) - 1, count).long().tolist()})
    return {str(row): weight[row, :width].to(torch.bfloat16).float().tolist() for row in rows}


def strange_rows(weight: Float[Tensor, "V H"], rows: Mapping[str, list[float]]) -> list[int]:
    """Those of ``rows`` (see ``sample_rows``; numbered by token) that are not the rows of ``weight``."""
    own = {row: weight[int(row), : len(values)].float().cpu() for row, values in rows.items()}
    return [int(r) for r, v in rows.items() if not torch.allclose(own[r], torch.tensor(v), rtol=2e-2, atol=1e-4)]


def check_copies(
    made_for: Mapping[str, Any], weights: Mapping[str, Tensor], logits: Mapping[str, float | None], *, name: str
) -> None:
    """Hold what a drafter's file says of its target's embedding and head against this target's.

    Args:
        made_for: ``DraftConfig.target``.
        weights: this target's rows by what they are, ``logits`` its settings of the head.

    Raises:
        ValueError: rows differ. (Another scale or cap of the logits is warned of.)
    """
    theirs_name = made_for.get("name", "another target")
    for what, rows in made_for.get("rows", {}).items():
        if strange := strange_rows(weights[what], rows):
            raise SettingError(
                "draft",
                f"made for {theirs_name}, whose {what} is not that of {name} (rows {strange} differ), but "
                "drafters use their target's",
                do="Give the target it was made for",
            )
    for what, ours in logits.items():
        theirs = made_for.get(what, ours)
        if theirs is not ours and (ours is None or not math.isclose(theirs, ours, rel_tol=1e-6)):
            warnings.warn(
                f"draft: its file states {what} {theirs}, but the target {name} has {ours}, which is "
                "used for its drafts too. Greedy drafts are the same; sampled ones may be accepted less often.",
                stacklevel=4,
            )


def find_stop_ids(
    config: PretrainedConfig,
    generation: GenerationConfig | None,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    name: str = "the target",
) -> tuple[int, ...]:
    """Every id that ends a generation: what generation config, model config and tokenizer name, united.

    The token that the chat template writes behind an answer is one too, whether or not any of them names it; a warning
    says where none does. Ids that the target does not have are left out, with a warning.

    Raises:
        ValueError: an id is no number.
    """
    named = [generation.eos_token_id if generation is not None else None]
    named += [config.eos_token_id, None if tokenizer is None else tokenizer.eos_token_id]
    found: set[int] = set()
    for entry in named:
        for token in entry if isinstance(entry, list) else [] if entry is None else [entry]:
            if not isinstance(token, int) or isinstance(token, bool):
                raise SettingError(
                    "target",
                    f"eos_token_id of {name} holds {token!r}, which is no id",
                    do="Write the token's number into its generation_config.json or config.json",
                )
            found.add(token)
    rows = setting(config, "vocab_size", default=1 << 62)
    if strange := sorted(token for token in found if not 0 <= token < rows):
        warnings.warn(
            f"target: {name} names {strange} as end of a text, but has ids 0..{rows - 1} only. They are left out: no "
            "answer can end with them.",
            stacklevel=3,
        )
        found.difference_update(strange)
    end = template_stop_id(tokenizer)
    if end is not None and end not in found:
        assert tokenizer is not None
        text = tokenizer.convert_ids_to_tokens(end)
        warnings.warn(
            f"target: the chat template of {name} ends an answer with {text} ({end}), which neither its "
            f"generation_config.json nor its config.json nor its tokenizer names as end. Answers stop there all the "
            "same; servers may not: add it to eos_token_id in generation_config.json.",
            stacklevel=3,
        )
        found.add(end)
    return tuple(sorted(found))


def max_positions(config: PretrainedConfig) -> int:
    """The longest row that the target is used for; very many where its configuration names no bound.

    That is what the model was made for, but never more than ``length_limit``: beyond it the features of a short row
    would depend on the rows beside it, and those of a long one on how far its decoding has come.
    """
    stated, limit = int(setting(config, *POSITIONS, default=1 << 20)), length_limit(config)
    return stated if limit is None else min(stated, limit.positions)


def warn_of_limit(config: PretrainedConfig, name: str) -> None:
    """Say that a target is used for fewer positions than its configuration states, and why."""
    stated, limit = int(setting(config, *POSITIONS, default=1 << 20)), length_limit(config)
    if limit is not None and limit.positions < stated:
        warnings.warn(
            f"target: {name} {limit.reason} as soon as a row is longer than {limit.positions} positions, so that a row "
            f"would depend on those beside it. It is used up to {limit.positions} positions of its {stated}: longer "
            "documents, prompts and answers are refused.",
            stacklevel=3,
        )
