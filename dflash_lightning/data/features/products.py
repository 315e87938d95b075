"""What kept features are computed with: products in bfloat16 take half the time on CPUs that have such arithmetic."""

from __future__ import annotations

import copy

import torch

from dflash_lightning.data.settings import FeatureProducts
from dflash_lightning.device import abilities
from dflash_lightning.ops.cpu_speed import bfloat16_is_fast
from dflash_lightning.ops.prepacked_linear import prepack_linears
from dflash_lightning.ops.rounded_linear import round_linears
from dflash_lightning.target import FrozenTarget
from dflash_lightning.target.families import Anatomy


def with_products(target: FrozenTarget, products: FeatureProducts, *, exact: bool = False) -> FrozenTarget:
    """The target as kept features are computed by it; itself where ``products`` is null.

    Otherwise a copy for features only, which shares embedding and norms and has passed the target's own checks of
    features and packing. It is given documents one by one: on a CPU they cost less than in a packed row.
    ``"bfloat16"`` rounds the factors of every product (see ``RoundedLinear``): features then differ by some 4e-3,
    relative, as they do when they are kept in bfloat16. ``"float32"`` lays the weights out for long rows once, which
    changes the last bits. ``"auto"`` is the former on CPUs that measure fast in bfloat16, else the latter; it is null
    off the CPU and for a target that is not float32. With ``exact``, for features that teach, ``"auto"`` never rounds.

    Raises:
        ValueError: the copy's features are not the intact model's.
    """
    if products == "auto":
        if not abilities(target.device).own_kernels or target.dtype != torch.float32:
            return target
        products = "bfloat16" if bfloat16_is_fast() and not exact else "float32"
    if products is None:
        return target
    other, anatomy = copy.copy(target), target.anatomy
    decoder = (round_linears if products == "bfloat16" else prepack_linears)(anatomy.decoder)
    other.anatomy = Anatomy(decoder, anatomy.layers_name, anatomy.norm_name)
    other.products = torch.bfloat16 if products == "bfloat16" else target.dtype
    other._trunks = {}
    intact = target.run_intact_probe()
    other.check_features(intact)
    other.check_packing(intact)
    return other
