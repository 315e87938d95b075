"""Settings of the training data that do not go together; needs no torch, so that a recipe's text tells them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from dflash_lightning.errors import SettingError

FeatureProducts = Literal["auto", "bfloat16", "float32"] | None
Prefetch = bool | Literal["auto"]
_PRODUCTS = ("auto", "bfloat16", "float32", None)
_KEPT = ("ram", "disk", None)


def check_data(
    *,
    max_length: int,
    row_tokens: int | None,
    features: Any,
    cache_features: str | None,
    feature_products: str | None,
    features_folder: str | None,
    cache_also: Any,
    prefetch_features: Any,
) -> None:
    """Refuse settings that contradict each other (arguments as those of ``DraftData``).

    Raises:
        ValueError: rows are shorter than documents may be; a setting is unknown, or nothing would use it.
    """
    if row_tokens is not None and row_tokens < max_length:
        raise SettingError(
            "data.row_tokens",
            f"a row of {row_tokens} cannot hold a document of data.max_length={max_length} tokens",
            do="Raise row_tokens or lower max_length",
        )
    if cache_features not in _KEPT:
        what = f"{cache_features!r} is unknown"
        raise SettingError("data.cache_features", what, "Use 'ram', 'disk' or null")
    if feature_products not in _PRODUCTS:
        raise SettingError(
            "data.feature_products",
            f"{feature_products!r} is unknown",
            allowed="Use 'auto', 'bfloat16', 'float32' or null (as the target is)",
        )
    if not isinstance(prefetch_features, bool) and prefetch_features != "auto":
        what = f"{prefetch_features!r} is unknown"
        raise SettingError("data.prefetch_features", what, "Use 'auto', true or false")
    if feature_products is not None and cache_features is None:
        raise SettingError(
            "data.feature_products",
            "applies to features that are kept only",
            do="Remove it, or set data.cache_features=ram or disk",
        )
    if feature_products is not None and features is not None:
        raise SettingError(
            "data.feature_products",
            "applies to features that the target computes here, but servers compute them (data.features)",
            do="Remove it",
        )
    if features_folder is not None and cache_features != "disk":
        raise SettingError(
            "data.features_folder",
            "applies to features on disk only",
            do="Remove it, or set data.cache_features=disk",
        )
    if cache_also is not None:
        _check_cache_also(cache_also, kept=cache_features is not None)


def _check_cache_also(also: Any, *, kept: bool) -> None:
    where, allowed = "data.cache_also", "Name layer_ids (a list of decoder layers) and last_hidden (true or false)"
    if not kept:
        do = "Remove it, or set data.cache_features=ram or disk"
        raise SettingError(where, "applies to features that are kept only", do=do)
    if not isinstance(also, Mapping):
        raise SettingError(where, f"{also!r} is no mapping", allowed)
    if unknown := sorted({*also} - {"layer_ids", "last_hidden"}):
        raise SettingError(where, f"{unknown} is unknown", allowed)
    ids, last = also.get("layer_ids") or [], also.get("last_hidden", False)
    if not all(type(i) is int and i >= 0 for i in ids) or not isinstance(last, bool):
        raise SettingError(where, f"{dict(also)} is not understood", allowed)
