"""Settings of other programs' files that name parts besides the plain ones, in both directions.

DFlash 2 and LiLiCorr have one spelling in all programs that were read (MH 1.6, 2.1): keys of ``dflash_config``. There
stand SpecForge's keys of Domino, too; those of speculators' xPress are flat. Drafters of these two are only read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
PROJECTOR, ENABLED = "projector_type", "lilicorr_enabled"
SHIFT, PURE = "shift_label", "pure_draft_prefix_len"  # of Domino: blocks that all predict, slots that are not corrected
KEYS = {*CONVOLUTION, *SELECTOR, *LATTICE, *PREFIX, PROJECTOR, ENABLED, SHIFT, PURE}
_ARCHITECTURES = {
    "DFlash2DraftModel": ("selector", SELECTOR),
    "LiLiCorrDraftModel": ("lattice", LATTICE),
    "DominoDraftModel": ("prefix", PREFIX),
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


def settings_of(components: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that such files state of a drafter's parts; empty for the plain ones."""
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
    return stated


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
        kind, words = ((int, float), "number") if key in _REAL else ((int,), "whole number")
        if type(settings[key]) not in kind:
            raise ValueError(f"{where}: config.json states {key} {settings[key]!r}, which is no {words}. Correct it.")
    return found
