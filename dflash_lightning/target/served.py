"""What a target does when it is served that it does not do here: penalties, bans and sampling of generation_config.

Figures and replays are of the target's own law, plainly greedy unless the command line says otherwise. transformers'
``generate`` applies all of ``generation_config.json`` by default; vLLM and SGLang take the sampling settings and the
repetition penalty from it. A drafter is accepted less often on text that is made otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from dflash_lightning.target.families import setting
from dflash_lightning.target.frozen import FrozenTarget

# The value that changes nothing; null always changes nothing. Sampling first: it matters to every server.
_NEUTRAL: dict[str, Any] = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "force_words_ids": None,
    "constraints": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "stop_strings": None,
    "exponential_decay_length_penalty": None,
    "sequence_bias": None,
    "guidance_scale": 1.0,
    "watermarking_config": None,
    "token_healing": False,
    "num_beams": 1,
    "num_beam_groups": 1,
    "penalty_alpha": None,
    "dola_layers": None,
}
# What vLLM 0.33 and SGLang 0.5.23 read of generation_config.json.
SERVERS_READ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_FALSE_TOO: tuple[Any, ...] = (None, [], {}, -1)  # spellings of "off" beside the neutral value


def served_settings(target: FrozenTarget) -> dict[str, Any]:
    """What ``generation_config`` asks for beyond the plain law, by transformers' names; empty where nothing.

    Sampling settings count also where ``do_sample`` is not set: servers take them all the same.
    """
    config = target.model.generation_config
    stated = {} if config is None else config.to_dict()
    return {
        name: stated[name]
        for name, neutral in _NEUTRAL.items()
        if name in stated and stated[name] not in _FALSE_TOO and stated[name] != neutral and not _greedy(name, stated)
    }


def _greedy(name: str, stated: Mapping[str, Any]) -> bool:
    """A temperature of 0, and a choice among one token, are greedy decoding by another name."""
    return not stated.get("do_sample") and (name, stated[name]) in (("temperature", 0), ("top_k", 1))


def served_line(target: FrozenTarget, applied: Mapping[str, Any] | None = None) -> str | None:
    """One sentence for whoever reads a figure; null where the target is served as it is measured.

    ``applied`` are the sampling settings that were measured with (``temperature``, ``top_k``, ``top_p``): those that
    say the same are no difference.
    """
    asked, applied = served_settings(target), dict(applied or {})
    if applied.get("temperature"):
        applied["do_sample"] = True
    differing = {name: value for name, value in asked.items() if applied.get(name) != value}
    if not differing:
        return None
    read = [name for name in differing if name in SERVERS_READ]
    servers = f"vLLM and SGLang {', '.join(read)}" if read else "vLLM and SGLang none of it"
    return (
        f"served otherwise: the generation_config of {target.facts.name} asks for {in_words(differing)}, which was not "
        f"applied here. By default transformers' generate applies it, {servers}; drafts are then accepted less "
        "often than these figures say."
    )


def in_words(settings: Mapping[str, Any]) -> str:
    """``repetition_penalty=1.3, suppress_tokens=[1, 2, 3, ...] (90)``: long lists are cut."""
    return ", ".join(f"{name}={_short(value)}" for name, value in settings.items())


def _short(value: Any, limit: int = 3) -> str:
    if isinstance(value, list) and len(value) > limit:
        return f"[{', '.join(map(str, value[:limit]))}, ...] ({len(value)})"
    return str(value)


def served_positions(target: FrozenTarget) -> int:
    """The longest text that servers give the target room for.

    Servers size a drafter's rotary table by what its own file states. They count positions their own way: a scaled
    rotation multiplies those that it starts from (yarn: ``original_max_position_embeddings``), whatever
    ``max_position_embeddings`` says.
    """
    config: PretrainedConfig = target.model.config
    stated = setting(config, "max_position_embeddings", default=target.facts.max_positions)
    found = [target.facts.max_positions, int(stated)]
    if config.model_type.startswith("gemma3"):  # its number is that of the scaled rotation already
        return max(found)
    rope = setting(config, "rope_parameters", default={})
    nested = [value for value in rope.values() if isinstance(value, dict)]
    for block in nested or [rope]:
        kind, factor = block.get("rope_type", "default"), block.get("factor") or 1.0
        if kind in ("yarn", "linear", "dynamic"):
            begin = block.get("original_max_position_embeddings") if kind == "yarn" else stated
            found.append(int((begin or stated) * factor))
    return max(found)
