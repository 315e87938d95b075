"""The network that scores neighbouring candidates of a block (LiLiCorr, arXiv 2608.20530; MH 1.1).

Its tensors have the names and shapes that serving engines load.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_lightning.ops.norm import RMSNorm

NUM_FEATURES = 5


@dataclass(frozen=True)
class LatticeSizes:
    """Of the network: ``slots`` predict in a block, with ``candidates`` each; ``width`` is the drafter's."""

    width: int
    slots: int
    candidates: int
    hidden: int
    layers: int
    heads: int
    mlp_ratio: float | int
    factors: int
    norm_eps: float


class LatticeNetwork(nn.Module):
    """Scores of the first slot's candidates, and of every pair of candidates of neighbouring slots.

    A candidate is known by its token's embedding, its slot's hidden state and five features of its log-probability. All
    candidates of a block look at each other, under a bias by the distance of their slots. What comes of it gives each
    an out-vector and an in-vector. A pair's score is ``scale`` times the cosine of the out-vector before and the
    in-vector after; the context row before the block stands in for the out-vector before the first slot.
    """

    def __init__(self, sizes: LatticeSizes, *, vector_eps: float, scale: float | int) -> None:
        super().__init__()
        self.vector_eps, self.scale = vector_eps, scale
        h, slots = sizes.hidden, sizes.slots
        if h != sizes.width:
            self.token_proj = nn.Linear(sizes.width, h)
        self.pass_hidden_proj = nn.Linear(sizes.width, h)
        self.feature_mlp = nn.Sequential(
            nn.LayerNorm(NUM_FEATURES, eps=1e-5), nn.Linear(NUM_FEATURES, h), nn.SiLU(), nn.Linear(h, h)
        )
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, slots, 1, h))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, sizes.candidates, h))
        self.relative_slot_bias = nn.Parameter(torch.zeros(sizes.heads, 2 * slots + 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(sizes.heads))
        self.layers = nn.ModuleList(LatticeLayer(sizes) for _ in range(sizes.layers))
        self.output_norm = RMSNorm(h, eps=sizes.norm_eps)
        self.context_proj = nn.Linear(sizes.width, h)
        self.anchor_norm = RMSNorm(h, eps=sizes.norm_eps)
        self.factor_input_proj = nn.Linear(3 * h, h)
        self.out_head = nn.Linear(h, sizes.factors)
        self.in_head = nn.Linear(h, sizes.factors)
        self.anchor_out_head = nn.Linear(h, sizes.factors)

    @torch.no_grad()
    def initialise(self, std: float) -> None:
        """Normal weights, no biases. The factors must not begin at 0: of a product of zeros nothing is learnt."""
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                weight.zero_()
            elif weight.ndim == 2:
                nn.init.normal_(weight, std=std)

    def project_tokens(self, embeddings: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows h"]:
        """What is known of tokens, from rows of the target's embedding."""
        embeddings = embeddings.to(self.output_norm.weight.dtype)
        return self.token_proj(embeddings) if hasattr(self, "token_proj") else embeddings

    def forward(
        self,
        tokens: Float[Tensor, "M D k h"],
        hidden: Float[Tensor, "M D H"],
        log_probs: Float[Tensor, "M D k"],
        boundary: Float[Tensor, "M H"],
    ) -> tuple[Float[Tensor, "M k"], Float[Tensor, "M d k k"]]:
        """Scores ``start`` and ``pair`` of ``M`` blocks, in fp32.

        ``pair[m, s, i, j]`` is of candidate ``i`` of slot ``s`` and candidate ``j`` of slot ``s + 1``.

        Fewer slots than the network has are the first of them. ``boundary`` is the context row before each block, zeros
        where there is none.
        """
        x = tokens + self.pass_hidden_proj(hidden.to(tokens.dtype))[:, :, None]
        x = x + self.feature_mlp(candidate_features(log_probs).to(self.output_norm.weight.dtype))
        x = x + self.slot_embedding[0, :, : x.shape[1]] + self.rank_embedding[0]
        shape, bias = x.shape, self.attention_bias(x.shape[1], x.shape[2])
        x = x.flatten(1, 2)
        for layer in self.layers:
            x = layer(x, bias)
        x = self.output_norm(x).view(shape)
        there = (boundary != 0).any(-1, keepdim=True)
        u = self.anchor_norm(torch.where(there, self.context_proj(boundary.to(tokens.dtype)), 0.0))
        each = u[:, None, None].expand_as(x)
        g = F.silu(self.factor_input_proj(torch.cat([x, each, x * each], dim=-1)))
        leaving, entering = self._unit(self.out_head(g)), self._unit(self.in_head(g))
        anchor = self._unit(self.anchor_out_head(u))
        with torch.autocast(x.device.type, enabled=False):
            start = torch.einsum("mf,mjf->mj", anchor, entering[:, 0])
            pair = torch.einsum("msif,msjf->msij", leaving[:, :-1], entering[:, 1:])
        return self.scale * start, self.scale * pair

    def attention_bias(self, slots: int, candidates: int) -> Float[Tensor, "heads n n"]:
        """What is added to attention, by the slot that asks minus the slot that is asked; one more in the same slot."""
        place = torch.arange(slots, device=self.same_slot_bias.device)
        middle = self.relative_slot_bias.shape[1] // 2
        by_slot = self.relative_slot_bias[:, place[:, None] - place[None] + middle]
        by_slot = by_slot + self.same_slot_bias[:, None, None] * torch.eye(slots, device=place.device)
        return by_slot.repeat_interleave(candidates, 1).repeat_interleave(candidates, 2)

    def _unit(self, vectors: Float[Tensor, "*rows f"]) -> Float[Tensor, "*rows f"]:
        return F.normalize(vectors.to(torch.promote_types(torch.float32, vectors.dtype)), dim=-1, eps=self.vector_eps)


class LatticeLayer(nn.Module):
    """Pre-norm attention among all candidates of a block, and an MLP."""

    def __init__(self, sizes: LatticeSizes) -> None:
        super().__init__()
        h = sizes.hidden
        inner = int(h * sizes.mlp_ratio)
        self.attn_norm = RMSNorm(h, eps=sizes.norm_eps)
        self.attn = LatticeAttention(h, sizes.heads)
        self.mlp_norm = RMSNorm(h, eps=sizes.norm_eps)
        self.mlp = nn.Sequential(nn.Linear(h, inner), nn.SiLU(), nn.Linear(inner, h))

    def forward(self, x: Float[Tensor, "M n h"], bias: Float[Tensor, "heads n n"]) -> Float[Tensor, "M n h"]:
        x = x + self.attn(self.attn_norm(x), bias)
        return x + self.mlp(self.mlp_norm(x))


class LatticeAttention(nn.Module):
    """Attention without a mask, under an additive bias; weights in the layout of ``torch.nn.MultiheadAttention``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.zeros(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "M n h"], bias: Float[Tensor, "heads n n"]) -> Float[Tensor, "M n h"]:
        projected = F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self.heads, -1))
        q, k, v = projected.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        return self.out_proj(found.transpose(1, 2).flatten(-2))


def candidate_features(log_probs: Float[Tensor, "*slots k"]) -> Float[Tensor, "*slots k five"]:
    """Of each candidate: its log-probability and probability over the whole vocabulary, how far it is behind the best
    of its slot, its rank between 0 and 1, and whether it is the best. Candidates come best first.
    """
    rank = torch.arange(log_probs.shape[-1], device=log_probs.device, dtype=log_probs.dtype)
    behind = log_probs - log_probs.amax(-1, keepdim=True)
    ranks = (rank / max(1, len(rank) - 1)).expand_as(log_probs)
    return torch.stack([log_probs, log_probs.exp(), behind, ranks, (rank == 0).to(rank).expand_as(log_probs)], dim=-1)


def true_rows(
    start: Float[Tensor, "M k"], pair: Float[Tensor, "M d k k"], places: Int[Tensor, "M D"]
) -> Float[Tensor, "M D k"]:
    """The scores of every slot's candidates after the candidate ``places`` of the slot before."""
    index = places[:, :-1, None, None].expand(-1, -1, 1, start.shape[-1])
    return torch.cat([start[:, None], pair.gather(2, index)[:, :, 0]], dim=1)
