"""Attention of slots over an explicit mask, and the masks: what blocks see of the context and of themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dflash_lightning.ops.norm import compute_dtype


def context_visible(
    rows: Int[Tensor, " R"],
    interval: tuple[Int[Tensor, "B N"], Int[Tensor, "B N"], Int[Tensor, "B N"]],
    *,
    block_size: int,
    window: int | None,
) -> Bool[Tensor, "B N k R"]:
    """Which context ``rows`` each slot sees, given (start, end, slot_row); ``k`` is 1 where all slots see the same."""
    start, end, slot_row = interval
    seen = (rows >= start[..., None]) & (rows < end[..., None])
    if window is None:
        return seen[:, :, None]
    slot_rows = slot_row[..., None] + torch.arange(block_size, device=rows.device)
    return seen[:, :, None] & (slot_rows[..., None] - rows < window)


def own_visible(block_size: int, *, causal: bool, window: int | None, device: torch.device) -> Bool[Tensor, "K K"]:
    """Which slots ``j`` (columns) of its own block slot ``i`` (row) sees."""
    slots = torch.arange(block_size, device=device)
    distance = slots[:, None] - slots[None, :]
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance.abs() < window)


def group(q: Float[Tensor, "b n K Hq D"], heads: int) -> Float[Tensor, "b heads n G K D"]:
    """Slots by the key-value head that they read, G query heads each."""
    b, n, k, hq, d = q.shape
    return q.reshape(b, n, k, heads, hq // heads, d).permute(0, 3, 1, 4, 2, 5)


def ungroup(x: Float[Tensor, "b heads n G K D"]) -> Float[Tensor, "b n K Hq D"]:
    """What ``group`` did, undone."""
    b, heads, n, g, k, d = x.shape
    return x.permute(0, 2, 4, 1, 3, 5).reshape(b, n, k, heads * g, d)


def masked_scores(
    q: Float[Tensor, "b h n G K D"],
    k_own: Float[Tensor, "b h n K D"],
    own: Bool[Tensor, "K K"],
    contexts: Sequence[tuple[Tensor, Tensor]],
    scale: float,
) -> list[Tensor]:
    """Masked, scaled scores [b, h, n, G, K, columns] in ``compute_dtype``: own block first, then every context.

    A context is (keys [b, R, h, D], visible [b, n, k, R]).
    """
    dtype = compute_dtype(q.dtype)
    b, h, n, g, k, d = q.shape
    early = q.dtype == dtype  # scaling q is cheaper than scaling scores, but would round twice in bf16
    if early:
        q = q * scale
    scores = []
    for keys, seen in [(None, own), *contexts]:
        if keys is None:
            product = q.reshape(b, h, n, g * k, d) @ k_own.transpose(-1, -2)
        else:
            product = q.reshape(b, h, n * g * k, d) @ keys.permute(0, 2, 3, 1)
            seen = seen[:, None, :, None]
        score = product.view(b, h, n, g, k, -1)
        score = score if early else score.to(dtype).mul_(scale)
        scores.append(score.masked_fill_(~seen, float("-inf")))
    return scores


def attend(
    q: Float[Tensor, "b n K Hq D"],
    k_own: Float[Tensor, "b n K h D"],
    v_own: Float[Tensor, "b n K h D"],
    own: Bool[Tensor, "K K"],
    parts: Sequence[tuple[Tensor, Tensor, Tensor]],
    scale: float,
) -> tuple[Float[Tensor, "b n K Hq D"], Float[Tensor, "b h n G K"]]:
    """Output and log-sum-exp over the own block and all ``parts`` (keys, values [b, R, h, D], visible [b, n, k, R])."""
    heads = k_own.shape[3]
    grouped = group(q, heads)
    b, h, n, g, k, d = grouped.shape
    parts = [part for part in parts if part[0].shape[1]]
    scores = masked_scores(grouped, k_own.permute(0, 3, 1, 2, 4), own, [(keys, seen) for keys, _, seen in parts], scale)
    top = scores[0].amax(-1)  # never -inf: a slot sees itself
    for score in scores[1:]:
        top = torch.maximum(top, score.amax(-1))
    weights = [(score - top[..., None]).exp_() for score in scores]
    total = weights[0].sum(-1)
    for weight in weights[1:]:
        total = total + weight.sum(-1)
    weights = [weight.to(q.dtype) for weight in weights]
    mine = weights[0].reshape(b, h, n, g * k, k) @ v_own.permute(0, 3, 1, 2, 4)
    out = mine.view(b, h, n, g, k, d).to(total.dtype)
    for weight, (_, values, _) in zip(weights[1:], parts, strict=True):
        out = out + (weight.reshape(b, h, n * g * k, -1) @ values.permute(0, 2, 1, 3)).view(b, h, n, g, k, d)
    return ungroup(out / total[..., None]).to(q.dtype), top + total.log()
