"""Root-mean-square norm that always computes in fp32."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dflash_lightning.ops.fused import FusedNorm, can_fuse, is_plain


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms, rotations and softmax are computed: fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(dtype, torch.float32)


def trains(x: Tensor, weight: Tensor) -> bool:
    """Whether ``x`` [*rows D] and ``weight`` [*rows D] are part of a training step that ``ops.fused`` can do."""
    asked = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    fits = x.shape[-1:] == weight.shape[-1:] and weight.dtype == torch.float32
    return asked and fits and can_fuse(x, weight)


class RMSNorm(nn.Module):
    """``weight * x / rms(x)`` over the last dimension, in the dtype of ``x``; computed in fp32, also under autocast."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        if trains(x, self.weight):
            return FusedNorm.apply(x, self.weight, None, None, self.eps, x.dtype)
        y = x.to(compute_dtype(x.dtype))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.to(y.dtype)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def norm_for_products(x: Float[Tensor, "*rows D"], norm: nn.Module) -> Float[Tensor, "*rows D"]:
    """``norm(x)`` for linear layers and nothing else.

    Autocast would cast it for each of them; in training steps that ``ops.fused`` can do, it is made in their dtype.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device) and isinstance(norm, RMSNorm) and is_plain(norm, RMSNorm):
        dtype = torch.get_autocast_dtype(device)
        if dtype == torch.bfloat16 and trains(x, norm.weight):
            return FusedNorm.apply(x, norm.weight, None, None, norm.eps, dtype)
    normed: Tensor = norm(x)
    return normed
