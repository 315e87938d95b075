"""A Mamba-2 layer over the slots of a block, which begins from a state of its own for every block."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_lightning.errors import SettingError
from dflash_lightning.ops.norm import RMSNorm, compute_dtype
from dflash_lightning.ops.state_scan import state_scan

_STEPS = (1e-3, 1e-1)  # between which the steps of the heads start, as in Mamba-2


@dataclass(frozen=True)
class StateShape:
    """Sizes of a state layer: ``heads`` of ``head_dim`` features and ``states`` each; ``groups`` share what is written
    and read; ``kernel`` slots of the convolution before the scan.
    """

    heads: int
    head_dim: int
    states: int
    groups: int
    kernel: int

    def __post_init__(self) -> None:
        for setting, value in vars(self).items():
            if value < 1:
                raise SettingError(f"drafter.state_{setting}", f"{value} leaves no layer", "Use 1 or more")
        if self.heads % self.groups:
            raise SettingError(
                "drafter.state_groups", f"{self.groups} do not divide {self.heads} heads", "Use a divisor of them"
            )

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.heads * self.head_dim

    @property
    def size(self) -> int:
        """Numbers in the state of a block."""
        return self.inner * self.states


class StateLayer(nn.Module):
    """``x + W_out(RMSNorm(y silu(z)))``, where ``y`` is the scan of the convolved input (Mamba-2, arXiv 2405.21060).

    Slots see their own block only, and none behind them. Every block begins from its ``seed``, and the convolution
    from zeros: nothing passes from block to block.
    """

    def __init__(self, width: int, shape: StateShape, *, eps: float) -> None:
        super().__init__()
        self.shape = shape
        mixed = shape.inner + 2 * shape.groups * shape.states
        self.input_layernorm = RMSNorm(width, eps=eps)
        self.in_proj = nn.Linear(width, shape.inner + mixed + shape.heads, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(mixed, shape.kernel))
        self.conv_bias = nn.Parameter(torch.empty(mixed))
        self.step_bias = nn.Parameter(torch.empty(shape.heads))
        self.log_rate = nn.Parameter(torch.empty(shape.heads))
        self.skip = nn.Parameter(torch.empty(shape.heads))
        self.norm = RMSNorm(shape.inner, eps=eps)
        self.out_proj = nn.Linear(shape.inner, width, bias=False)

    @torch.no_grad()
    def initialise(self, *, std: float) -> None:
        """Steps from ``_STEPS`` and rates from 1 to 16, evenly in the logarithm; skips of 1; normal matrices."""
        for linear in (self.in_proj, self.out_proj):
            nn.init.normal_(linear.weight, std=std)
        nn.init.uniform_(self.conv_weight, -(self.shape.kernel**-0.5), self.shape.kernel**-0.5)
        nn.init.zeros_(self.conv_bias)
        step = torch.linspace(math.log(_STEPS[0]), math.log(_STEPS[1]), self.shape.heads).exp()
        self.step_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus of it is the step
        self.log_rate.copy_(torch.linspace(0.0, math.log(16.0), self.shape.heads))
        nn.init.ones_(self.skip)

    def forward(self, x: Float[Tensor, "B N K H"], seed: Float[Tensor, "B N size"]) -> Float[Tensor, "B N K H"]:
        shape = self.shape
        mixed = self.conv_weight.shape[0]
        gate, inputs, step = self.in_proj(self.input_layernorm(x)).split([shape.inner, mixed, shape.heads], dim=-1)
        wide = compute_dtype(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            inputs = F.silu(self._convolved(inputs.to(wide)))
            step = F.softplus(step.to(wide) + self.step_bias.to(wide))
            y = self._scanned(inputs, step, seed.to(wide)).flatten(-2)
            y = self.norm(y * F.silu(gate.to(wide)))
        return x + self.out_proj(y.to(x.dtype))

    def _convolved(self, inputs: Float[Tensor, "B N K M"]) -> Float[Tensor, "B N K M"]:
        """Each feature over the slots up to its own."""
        taps, slots = self.shape.kernel, inputs.shape[2]
        padded, weight = F.pad(inputs, (0, 0, taps - 1, 0)), self.conv_weight.to(inputs.dtype)
        out = self.conv_bias.to(inputs.dtype).expand_as(inputs)
        for tap in range(taps):
            out = out + padded[:, :, tap : tap + slots] * weight[:, tap]
        return out

    def _scanned(
        self, inputs: Float[Tensor, "B N K M"], step: Float[Tensor, "B N K heads"], seed: Float[Tensor, "B N size"]
    ) -> Float[Tensor, "B N K heads P"]:
        shape = self.shape
        both = shape.groups * shape.states
        features, write, read = inputs.split([shape.inner, both, both], dim=-1)
        features = features.unflatten(-1, (shape.heads, shape.head_dim))
        write, read = (
            each.unflatten(-1, (shape.groups, shape.states)).repeat_interleave(shape.heads // shape.groups, dim=-2)
            for each in (write, read)
        )
        state = seed.unflatten(-1, (shape.heads, shape.head_dim, shape.states))
        y = state_scan(features, step, -self.log_rate.to(step.dtype).exp(), write, read, state)
        return y + self.skip.to(y.dtype)[:, None] * features
