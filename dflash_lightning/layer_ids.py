"""Which layers of a target a drafter reads: checked, and chosen where a recipe names none."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from dflash_lightning.errors import SettingError


def spaced_layer_ids(num_target_layers: int, num_features: int) -> list[int]:
    """The formula of DFlash's released code as it stands, whether or not the target has layers enough for it.

    One feature is the middle layer; otherwise ``round(1 + i (L - 4) / (T - 1))``.
    """
    if num_features == 1:
        return [num_target_layers // 2]
    return [round(1 + i * (num_target_layers - 4) / (num_features - 1)) for i in range(num_features)]


def default_layer_ids(num_target_layers: int, num_features: int) -> list[int]:
    """Evenly spaced target layers, the last one three before the end, as in DFlash's released code.

    Raises:
        ValueError: the target has too few layers for them to be different and ascending.
    """
    ids = spaced_layer_ids(num_target_layers, num_features)
    if ids[0] < 0 or any(b <= a for a, b in pairwise(ids)):
        advice = (
            f"Set conditioning.num_features=1, or name the layers: conditioning.target_layer_ids="
            f"{_evenly(num_target_layers, num_features)} (0..{num_target_layers - 1})."
        )
        raise SettingError(
            "conditioning.num_features",
            f"{num_features} evenly spaced layers, the last one three before the end, do not fit into a target of "
            f"{num_target_layers} decoder layers (they would be {ids})",
            do=advice,
        )
    return ids


def kv_layer_ids(stated: Iterable[int] | None, num_target_layers: int, num_layers: int) -> list[int]:
    """The target layers whose keys and values ``num_layers`` draft layers read, one each; null spaces them evenly."""
    return default_layer_ids(num_target_layers, num_layers) if stated is None else list(stated)


def check_layer_ids(layer_ids: Iterable[int], num_target_layers: int, *, name: str) -> None:
    """Refuse ids that are not decoder layers of the target ``name``, or named twice, before anything is computed.

    Raises:
        ValueError: says which id is wrong, what is allowed, and ids that would work.
    """
    ids, n = list(layer_ids), num_target_layers
    advice = f"Leave it null for the method's own choice, or use for example {_evenly(n, len(ids))}."
    for i in ids:
        if not 0 <= i < n:
            raise SettingError(
                "conditioning.target_layer_ids",
                f"{ids} asks for layer {i}, but {name} has {n} decoder layers (0..{n - 1}; id i is the output of "
                "layer i)",
                do=advice,
            )
    if len(set(ids)) != len(ids):
        raise SettingError("conditioning.target_layer_ids", f"{ids} names a layer twice", do=advice)


def _evenly(num_target_layers: int, count: int) -> list[int]:
    """At most ``count`` different layers, evenly spaced."""
    n, count = num_target_layers, min(max(count, 1), num_target_layers)
    return [max(i, 0) for i in sorted({round((j + 1) * n / (count + 1)) - 1 if n > count else j for j in range(count)})]
