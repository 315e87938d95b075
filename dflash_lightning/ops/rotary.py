"""Rotary position embedding of the plain kind: full rotary, half-split pairs, no scaling.

The angles are computed from (theta, head_dim, positions) whenever they are needed: there is no buffer that a cast to
bf16 could round, that a meta-device load could leave empty, or that could exist on some ranks only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.ops.fused import FusedNorm, is_plain
from dflash_lightning.ops.norm import RMSNorm, compute_dtype, trains

Rotation = tuple[Tensor, Tensor]  # cos, sin: [..., D]


def check_rope(rope_parameters: Mapping[str, Any], *, where: str) -> float:
    """The rotary base of ``rope_parameters``, after checking that they describe the plain kind.

    Raises:
        ValueError: a scaled or partial rotation, or no base. A drafter that rotates otherwise than it says drafts
            badly without any error, so nothing is assumed here.
    """
    kind = rope_parameters.get("rope_type", rope_parameters.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"{where}: rope_type {kind!r} is not supported in a drafter; only 'default' is. "
            "Leave it null to rotate plainly with the target's rope_theta."
        )
    partial = rope_parameters.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ValueError(
            f"{where}: partial_rotary_factor {partial} is not supported in a drafter; only 1.0 is. "
            "Leave rope_parameters null to rotate the whole head with the target's rope_theta."
        )
    theta = rope_parameters.get("rope_theta")
    if not isinstance(theta, int | float) or isinstance(theta, bool) or not 0 < theta < math.inf:
        raise ValueError(f"{where}: rope_theta is {theta!r}, but must be a positive number, for example 10000.0.")
    return float(theta)


def make_rotation(
    positions: Int[Tensor, "*rows"], *, theta: float, head_dim: int, dtype: torch.dtype
) -> tuple[Float[Tensor, "*rows D"], Float[Tensor, "*rows D"]]:
    """Cosines and sines of every position, at least fp32, to be shared by all layers."""
    dtype = compute_dtype(dtype)
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[..., None].to(dtype) * (1.0 / theta**exponents).to(dtype)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Float[Tensor, "*rows heads D"], rotation: Rotation) -> Float[Tensor, "*rows heads D"]:
    """``x`` with its feature pairs (i, i + D/2) turned by ``rotation``; computed in fp32, returned in x's dtype."""
    cos, sin = (part[..., None, :] for part in rotation)
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


def norm_and_rotate(
    x: Float[Tensor, "*rows heads D"], norm: nn.Module, rotation: Rotation
) -> Float[Tensor, "*rows heads D"]:
    """``rotate(norm(x), rotation)``; for an ``RMSNorm`` one pass in training steps that ``ops.fused`` can do."""
    cos, sin = rotation
    fits = cos.shape == sin.shape == (*x.shape[:-2], x.shape[-1]) and cos.dtype == sin.dtype == torch.float32
    if fits and isinstance(norm, RMSNorm) and is_plain(norm, RMSNorm) and trains(x, norm.weight):
        return FusedNorm.apply(x, norm.weight, cos.contiguous(), sin.contiguous(), norm.eps, x.dtype)
    return rotate(norm(x), rotation)
