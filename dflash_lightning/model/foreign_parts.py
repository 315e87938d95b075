"""Settings and tensor names of other programs' files that belong to parts besides the plain ones, in both directions.

DFlash 2 and LiLiCorr have one spelling in all programs that were read (MH 1.6, 2.1): keys of ``dflash_config``. There
stand SpecForge's keys of Domino and DSpark, too. Those of speculators' DSpark and xPress are flat.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dflash_lightning.draft_config import DraftConfig

CONVOLUTION = {"conv_kernel_size": "kernel_size", "conv_group_size": "group_size"}
SELECTOR = {"selector_rank": "rank", "selector_top_k": "candidates"}
LATTICE = {
    "lilicorr_candidate_topk": "candidates",
    "lilicorr_hidden_size": "hidden_size",  # 0: the drafter's width
    "lilicorr_num_layers": "num_layers",
    "lilicorr_num_heads": "num_heads",
    "lilicorr_mlp_ratio": "mlp_ratio",
    "lilicorr_factor_dim": "factor_dim",
    "lilicorr_vector_eps": "vector_eps",
    "lilicorr_logit_scale": "logit_scale",
}
_REAL = {"lilicorr_mlp_ratio", "lilicorr_vector_eps", "lilicorr_logit_scale"}  # all others are whole numbers
PREFIX = {"gru_hidden_dim": "state_size", "emb_dim": "rank"}
REFINER = {"xpress_rank": "rank", "xpress_mlp_ratio": "expansion", "num_jacobi_passes": "passes"}
MARKOV = {
    "markov_rank": "rank",
    "enable_confidence_head": "confidence",
    "confidence_head_with_markov": "confidence_token",
}
_FLAGS = {"enable_confidence_head", "confidence_head_with_markov"}
VARIANT, ALPHA = "markov_head_type", "confidence_head_alpha"  # of DSpark; SpecForge has a confidence where alpha > 0
# How names of a head's tensors begin in other programs' files, and here. Other heads have the same names everywhere.
TENSORS: dict[str, dict[str, str]] = {
    "markov": {
        "markov_head.markov_w1.": "previous.",
        "markov_head.markov_w2.": "following.",
        "confidence_head.proj.": "certainty.",
    },
    "prefix": {
        "prefix_gru.weight_ih_l0": "memory.read.weight",
        "prefix_gru.weight_hh_l0": "memory.keep.weight",
        "embed_proj.0.": "narrow.",
        "embed_proj.2.": "following.",
    },
    "refiner": {
        **{
            f"refiner_head.{name}.": f"{name}."
            for name in ("token_embed", "down_h", "down_g", "in_proj", "mlp_gate", "mlp_up", "mlp_down", "readout")
        },
        "refiner_head.mix_l": "mix",
    },
}
PROJECTOR, ENABLED = "projector_type", "lilicorr_enabled"
SHIFT, PURE = "shift_label", "pure_draft_prefix_len"  # of Domino: blocks that all predict, slots that are not corrected
KEYS = {*CONVOLUTION, *SELECTOR, *LATTICE, *PREFIX, *MARKOV, PROJECTOR, ENABLED, SHIFT, PURE, VARIANT, ALPHA}
KEYS |= {"attention_mode"}  # of SpecForge's DSpark: whether heads share keys, which the numbers of heads say as well
_ARCHITECTURES = {
    "DFlash2DraftModel": ("selector", SELECTOR),
    "LiLiCorrDraftModel": ("lattice", LATTICE),
    "DominoDraftModel": ("prefix", PREFIX),
    "DSparkDraftModel": ("markov", MARKOV),
    "XPressDraftModel": ("refiner", REFINER),
}


def parts_of(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Drafter and head that a file's settings describe: ``{"drafter": {"name": .., "settings": ..}, "head": ..}``.

    Raises:
        ValueError: settings of a part are missing or no numbers, or those of two heads are there.
    """
    convolution = _some(settings, CONVOLUTION, where)
    drafter = {"num_layers": settings.get("num_hidden_layers", 0)} | (convolution or {})
    heads = {
        "selector": _some(settings, SELECTOR, where),
        "lattice": _lattice(settings, where),
        "prefix": _prefix(settings, where),
        "markov": _markov(settings, where),
        "refiner": _refiner(settings, where),
    }
    found = {name: own for name, own in heads.items() if own is not None}
    if len(found) > 1:
        raise ValueError(f"{where}: config.json states settings of {' and '.join(found)}: one drafter has one head.")
    for architecture in settings.get("architectures") or ():
        name, keys = _ARCHITECTURES.get(architecture, ("", {}))
        if name and name not in found:
            raise ValueError(f"{where}: config.json states the architecture {architecture} and none of {[*keys]}.")
    head = next(iter(found.items()), ("marginal", {}))
    return {
        "drafter": {"name": "block_transformer" if convolution is None else "conv_transformer", "settings": drafter},
        "head": {"name": head[0], "settings": head[1]},
    }


def settings_of(config: DraftConfig) -> dict[str, Any]:
    """The keys that such files state of a drafter's parts; empty for the plain ones."""
    components = config.components
    drafter, head = ((components[axis]["name"], components[axis]["settings"]) for axis in ("drafter", "head"))
    stated: dict[str, Any] = {}
    if drafter[0] == "conv_transformer":
        stated |= {key: drafter[1][setting] for key, setting in CONVOLUTION.items()}
    if head[0] == "selector":
        stated |= {key: head[1][setting] for key, setting in SELECTOR.items()}
    if head[0] == "lattice":
        stated |= {PROJECTOR: "lilicorr", ENABLED: True}
        stated |= {key: head[1][setting] for key, setting in LATTICE.items()}
        stated["lilicorr_hidden_size"] = stated["lilicorr_hidden_size"] or 0
    if head[0] == "prefix":
        stated |= {PROJECTOR: "domino", SHIFT: config.label_layout == "anchor_first", PURE: head[1]["pure_slots"]}
        stated |= {key: head[1][setting] for key, setting in PREFIX.items()}
    if head[0] == "markov":
        stated |= {PROJECTOR: "dspark", VARIANT: "vanilla"}
        stated |= {key: head[1].get(setting, True) for key, setting in MARKOV.items()}
    if head[0] == "refiner":
        # As many passes as drafts are what drawing in turn (null) gives.
        stated |= {key: head[1][setting] or config.alignment.num_drafts for key, setting in REFINER.items()}
    return stated


def names_elsewhere(head: str, names: Iterable[str]) -> dict[str, str]:
    """What tensors of a drafter with this head are called in other programs' files, by the name they have here."""
    found = {}
    for name in names:
        begins = ((there, here) for there, here in TENSORS.get(head, {}).items() if name.startswith(here))
        found[name] = next((there + name.removeprefix(here) for there, here in begins), name)
    return found


def _lattice(settings: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    on = settings.get(ENABLED) or settings.get(PROJECTOR) == "lilicorr"
    found = _some(settings, LATTICE, where) if on else None
    if on and found is None:
        raise ValueError(f"{where}: config.json asks for LiLiCorr's head and states none of {[*LATTICE]}.")
    return None if found is None else found | {"hidden_size": found["hidden_size"] or None}


def _prefix(settings: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    if settings.get(PROJECTOR) != "domino":
        return None
    found = _some(settings, PREFIX, where)
    if found is None:
        raise ValueError(f"{where}: config.json asks for Domino's head and states none of {[*PREFIX]}.")
    return found | {"pure_slots": settings.get(PURE) or 0}


def _markov(settings: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Where a file is silent, as SpecForge has it; speculators' files come with its defaults filled in."""
    if settings.get(PROJECTOR) != "dspark":
        return None
    if (kind := settings.get(VARIANT) or "vanilla") != "vanilla":
        raise ValueError(
            f"{where}: this is a DSpark drafter with {VARIANT}={kind!r}, which is not read; only 'vanilla' is, whose "
            "bias depends on the token before alone. Nothing was loaded."
        )
    alpha = settings.get(ALPHA) or 0.0
    silent = {"enable_confidence_head": alpha > 0, "confidence_head_with_markov": False}
    found = _some({**silent, **{k: v for k, v in settings.items() if v is not None}}, MARKOV, where)
    assert found is not None
    if found["rank"] < 1:
        raise ValueError(f"{where}: this is a DSpark drafter without a Markov head (markov_rank 0), which is not read.")
    return {**found, "confidence_bias": found["confidence"]}


def _refiner(settings: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    found = _some(settings, REFINER, where)
    if found is not None and settings.get("label_layout") != "anchor_first":
        raise ValueError(
            f"{where}: this is an xPress drafter whose refiner also counts the anchor's slot (sample_from_anchor is "
            "false), which the one here does not. Nothing was loaded."
        )
    return found


def _some(settings: Mapping[str, Any], keys: Mapping[str, str], where: str) -> dict[str, Any] | None:
    """The settings behind ``keys`` under our names; null where the file has none of them."""
    found = {ours: settings[key] for key, ours in keys.items() if settings.get(key) is not None}
    if not found:
        return None
    if missing := [key for key in keys if settings.get(key) is None]:
        raise ValueError(f"{where}: config.json states {[k for k in keys if k not in missing]}, but no {missing}.")
    for key in keys:
        kinds: tuple[type, ...] = (int,)
        words = "no whole number"
        if key in _REAL:
            kinds, words = (int, float), "no number"
        if key in _FLAGS:
            kinds, words = (bool,), "neither true nor false"
        if type(settings[key]) not in kinds:
            raise ValueError(f"{where}: config.json states {key} {settings[key]!r}, which is {words}. Correct it.")
    return found
