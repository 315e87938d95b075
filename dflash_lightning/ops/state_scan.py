"""The scan of a selective state space over the slots of a block (Mamba-2, arXiv 2405.21060), in plain tensor code."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def state_scan(
    x: Float[Tensor, "*blocks K M P"],
    step: Float[Tensor, "*blocks K M"],
    rate: Float[Tensor, " M"],
    write: Float[Tensor, "*blocks K M S"],
    read: Float[Tensor, "*blocks K M S"],
    seed: Float[Tensor, "*blocks M P S"],
) -> Float[Tensor, "*blocks K M P"]:
    """``y_t = h_t read_t`` of ``h_t = exp(rate step_t) h_(t-1) + step_t x_t write_t^T``, with ``h_(-1) = seed``.

    ``M`` heads of ``P`` features and ``S`` states. ``rate`` is negative and ``step`` positive. All slots at once, as
    a triangular matrix of decays: right for the few slots of a block, quadratic in their number. No block sees another.
    """
    reached = (step * rate).cumsum(-2)  # log of the decay from the seed to each slot
    heads = reached.transpose(-1, -2)  # [.., M, K]
    gap = heads[..., :, None] - heads[..., None, :]  # [.., M, t, u]
    slots = torch.ones(gap.shape[-2:], dtype=torch.bool, device=gap.device).tril()
    decay = gap.masked_fill(~slots, -torch.inf).exp()
    overlap = torch.einsum("...tms,...ums->...mtu", read, write)
    own = torch.einsum("...mtu,...ump->...tmp", overlap * decay, x * step[..., None])
    return own + torch.einsum("...tms,...mps->...tmp", read * reached.exp()[..., None], seed)


def state_steps(
    x: Float[Tensor, "*blocks K M P"],
    step: Float[Tensor, "*blocks K M"],
    rate: Float[Tensor, " M"],
    write: Float[Tensor, "*blocks K M S"],
    read: Float[Tensor, "*blocks K M S"],
    seed: Float[Tensor, "*blocks M P S"],
) -> Float[Tensor, "*blocks K M P"]:
    """What ``state_scan`` computes, slot by slot: the definition, which tests hold it to."""
    state, out = seed, []
    for slot in range(x.shape[-3]):
        decay = (step[..., slot, :] * rate).exp()[..., None, None]
        added = (x[..., slot, :, :] * step[..., slot, :, None])[..., None] * write[..., slot, :, None, :]
        state = decay * state + added
        out.append(torch.einsum("...mps,...ms->...mp", state, read[..., slot, :, :]))
    return torch.stack(out, dim=-3)
