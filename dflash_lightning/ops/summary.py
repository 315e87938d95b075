"""Attention of a few learned queries to a whole prefix: in one pass, for many prefixes at once, or part by part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_BLOCKS_AT_ONCE = 32  # whose weights over the prefix exist at a time


@dataclass
class Summary:
    """What queries found among some rows, and the log of the weight that these rows have together: -inf for none."""

    output: Float[Tensor, "B Hq R D"]
    log_weight: Float[Tensor, "B Hq R"]

    def where(self, there: Bool[Tensor, " B"]) -> Summary:
        """The same where ``there`` is true, and of no rows elsewhere."""
        mask = there[:, None, None]
        output = torch.where(mask[..., None], self.output, 0.0)
        return Summary(output, torch.where(mask, self.log_weight, -torch.inf))

    def merge(self, other: Summary) -> Summary:
        """The summary of the rows of both, as if they had been looked at in one pass."""
        weight = torch.logaddexp(self.log_weight, other.log_weight)
        known = torch.isfinite(weight)
        mine, theirs = (
            torch.where(known, (part.log_weight - torch.where(known, weight, 0.0)).exp(), 0.0)[..., None]
            for part in (self, other)
        )
        return Summary(mine * self.output + theirs * other.output, weight)


def _scores(queries: Float[Tensor, "Hq R D"], k: Float[Tensor, "B S Hkv D"]) -> Float[Tensor, "B Hkv G R S"]:
    """Scaled scores in fp32; query heads share key-value heads in groups."""
    grouped = queries.float().unflatten(0, (k.shape[2], -1))
    return torch.einsum("hgrd,bshd->bhgrs", grouped, k.float()) * queries.shape[-1] ** -0.5


def summarise(
    queries: Float[Tensor, "Hq R D"],
    k: Float[Tensor, "B S Hkv D"],
    v: Float[Tensor, "B S Hkv D"],
    visible: Bool[Tensor, "B S"],
) -> Summary:
    """The summary of the visible rows of each batch row, in fp32."""
    with torch.autocast(k.device.type, enabled=False):
        scores = _scores(queries, k).masked_fill(~visible[:, None, None, None], -torch.inf)
        weight = scores.logsumexp(-1)
        shares = (scores - torch.where(torch.isfinite(weight), weight, 0.0)[..., None]).exp()
        output = torch.einsum("bhgrs,bshd->bhgrd", shares, v.float())
    return Summary(output.flatten(1, 2), weight.flatten(1, 2))


def summarise_prefixes(
    queries: Float[Tensor, "Hq R D"],
    k: Float[Tensor, "B S Hkv D"],
    v: Float[Tensor, "B S Hkv D"],
    start: Int[Tensor, "B N"],
    end: Int[Tensor, "B N"],
) -> Float[Tensor, "B N Hq R D"]:
    """What the queries find among rows ``start <= j < end`` of every block; zeros where there is none.

    Weights of ``_BLOCKS_AT_ONCE`` blocks exist at a time, and are computed again in the backward pass.
    """
    rows, values = torch.arange(k.shape[1], device=k.device), v.float()

    def some(scores: Tensor, first: Tensor, last: Tensor) -> Tensor:
        seen = (rows >= first[..., None]) & (rows < last[..., None])  # [B n S]
        hidden = ~seen[:, :, None, None, None]
        shares = scores[:, None].masked_fill(hidden, -torch.inf)
        shares = torch.where(seen.any(-1)[:, :, None, None, None, None], shares, 0.0).softmax(-1)
        return torch.einsum("bnhgrs,bshd->bnhgrd", shares.masked_fill(hidden, 0.0), values)

    pieces = zip(start.split(_BLOCKS_AT_ONCE, 1), end.split(_BLOCKS_AT_ONCE, 1), strict=True)
    with torch.autocast(k.device.type, enabled=False):
        scores = _scores(queries, k)
        found = [checkpoint(some, scores, first, last, use_reentrant=False) for first, last in pieces]
    return torch.cat(found, dim=1).flatten(2, 3)
