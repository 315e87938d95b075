"""Settings of other programs' files that name parts besides the plain ones, in both directions.

DFlash 2 and LiLiCorr have one spelling in all programs that were read (MH 1.6, 2.1): keys of ``dflash_config``.
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
PROJECTOR, ENABLED = "projector_type", "lilicorr_enabled"
KEYS = {*CONVOLUTION, *SELECTOR, *LATTICE, PROJECTOR, ENABLED}
_ARCHITECTURES = {"DFlash2DraftModel": SELECTOR, "LiLiCorrDraftModel": LATTICE}


def parts_of(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Drafter and head that a file's settings describe: ``{"drafter": {"name": .., "settings": ..}, "head": ..}``.

    Raises:
        ValueError: settings of a part are missing, or those of two heads are there.
    """
    convolution = _some(settings, CONVOLUTION, where)
    drafter = {"num_layers": settings.get("num_hidden_layers", 0)} | (convolution or {})
    selector, lattice = _some(settings, SELECTOR, where), _lattice(settings, where)
    if selector is not None and lattice is not None:
        raise ValueError(f"{where}: config.json states {[*SELECTOR]} and {[*LATTICE]}: one drafter has one head.")
    for name in settings.get("architectures") or ():
        keys = _ARCHITECTURES.get(name)
        if keys is not None and (selector if keys is SELECTOR else lattice) is None:
            raise ValueError(f"{where}: config.json states the architecture {name} and none of {[*keys]}.")
    head = ("marginal", {}) if selector is None else ("selector", selector)
    if lattice is not None:
        head = ("lattice", lattice)
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


def _some(settings: Mapping[str, Any], keys: Mapping[str, str], where: str) -> dict[str, Any] | None:
    """The settings behind ``keys`` under our names; null where the file has none of them."""
    found = {ours: settings[key] for key, ours in keys.items() if settings.get(key) is not None}
    if not found:
        return None
    if missing := [key for key in keys if settings.get(key) is None]:
        raise ValueError(f"{where}: config.json states {[k for k in keys if k not in missing]}, but no {missing}.")
    return found
