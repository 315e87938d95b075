"""Features of many continuations of one text, in one forward: what a target computes when it verifies drafts."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from dflash_lightning.errors import SettingError
from dflash_lightning.ops.plain_mode import plain_mode
from dflash_lightning.target.families import VERIFIED_FAMILIES
from dflash_lightning.target.frozen import FrozenTarget
from dflash_lightning.target.intact import token_errors
from dflash_lightning.target.masks import branch_mask
from dflash_lightning.types import FeatureSpec, TargetFeatures

_PROBE = 12  # tokens


def branch_features(
    target: FrozenTarget,
    input_ids: Int[Tensor, "B S"],
    position_ids: Int[Tensor, "B S"],
    tokens: Int[Tensor, "B N W"],
    intervals: tuple[Int[Tensor, "B N"], Int[Tensor, "B N"]],
    spec: FeatureSpec,
) -> TargetFeatures:
    """Features of the ``N * W`` tokens of ``N`` branches, one branch after another; what decoding would compute there.

    Branch ``n`` continues its document at row ``end``: its first token stands where that row does, and sees the rows
    ``start <= j < end``. Costs a forward of ``S + N * W`` rows with an explicit mask of that size squared.

    Args:
        position_ids: restart with every document of a packed row.
        intervals: start and end of every branch, row indices; ``end`` is less than ``S``.

    Raises:
        ValueError: the target's attention takes no masks (see ``check_branches``).
    """
    check_attention(target)
    width = tokens.shape[2]
    with plain_mode(target.device):
        new = torch.ones_like(position_ids, dtype=torch.bool)
        new[:, 1:] = position_ids[:, 1:] - position_ids[:, :-1] != 1
        ahead = position_ids.gather(1, intervals[1])[..., None] + torch.arange(width, device=position_ids.device)
        # Branches may reach past the last position that there is; nothing there is ever decoded.
        ahead = ahead.clamp(max=_last_position(target))
        positions = torch.cat([position_ids, ahead.flatten(1)], dim=1)
        mask = branch_mask(target.model.config, new.cumsum(-1), positions, intervals, target.dtype)
        ids = torch.cat([input_ids, tokens.flatten(1)], dim=1)
        trunk = target.trunk(spec)
        output, stacked = trunk(ids, position_ids=positions, attention_mask=mask, use_cache=False)
        return trunk.features(ids, output, stacked).rows(input_ids.shape[1], ids.shape[1])


def check_attention(target: FrozenTarget) -> None:
    """Refuse a target whose attention takes no explicit mask.

    Raises:
        ValueError: names the setting.
    """
    implementation = target.model.config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise SettingError(
            "target.attn_implementation",
            f"{implementation!r} takes no mask for drafts that continue a text at many places",
            "Use sdpa or eager",
        )


def check_branches(target: FrozenTarget) -> None:
    """Refuse a target that computes something else for a branch than for the same text by itself.

    The families that the test suite holds to this are not tried. Any other costs two forwards of a few tokens.

    Raises:
        ValueError: the features differ by more than rounding, or the attention takes no masks.
    """
    check_attention(target)
    if target.facts.model_type in VERIFIED_FAMILIES:
        return
    ids = (torch.arange(_PROBE, device=target.device)[None] * 37 + 3) % target.facts.vocab_size
    at, places, half = torch.arange(_PROBE, device=target.device)[None], ids.new_tensor([[2, 5]]), _PROBE // 2
    tokens = torch.stack([ids[:, 2 : 2 + half], ids[:, 5 : 5 + half]], dim=1)
    spec = FeatureSpec((target.facts.num_layers - 1,))
    found = branch_features(
        target, ids.flip(1).scatter(1, at[:, :5], ids[:, :5]), at, tokens, (places * 0, places), spec
    )
    alone = target.features(ids, at, spec, packed=False)
    error = float(token_errors(found.hidden[0, :half, 0], alone.hidden[0, 2 : 2 + half, 0]).max())
    if not error <= target.tolerance:
        raise SettingError(
            "target",
            f"{target.facts.name} (family {target.facts.model_type!r}) computes other features for drafts that "
            f"continue a text at many places than for each by itself (relative difference {error:.1e}, allowed "
            f"{target.tolerance:.0e})",
            f"Use a target of a verified family: {', '.join(VERIFIED_FAMILIES)}",
        )


def _last_position(target: FrozenTarget) -> int:
    limits = [target.facts.max_positions, *([] if target.limit is None else [target.limit.positions])]
    return min(limits) - 1
