"""Convolutions, selector and lattice computed slowly from an export's tensors: the other half of ``conventions``.

Shares no code with the parts that are trained and decoded with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from dflash_lightning.export.in_turn import InTurn

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Parts:
    """What a config.json says of parts besides the plain ones; null where there is none.

    ``convolution`` are taps and the width of a group, ``selector`` rank and candidates, ``lattice`` the eight numbers
    of LiLiCorr under their names without the prefix. ``in_turn`` is a head that knows the tokens before a slot.
    """

    convolution: tuple[int, int] | None = None
    selector: tuple[int, int] | None = None
    lattice: Mapping[str, Any] | None = None
    in_turn: InTurn | None = None

    @classmethod
    def read(cls, stated: Mapping[str, Any]) -> Parts:
        """From the settings of a file, flat ones and those of ``dflash_config`` together."""
        pairs = [("conv_kernel_size", "conv_group_size"), ("selector_rank", "selector_top_k")]
        found = [tuple(int(stated[key]) for key in pair) if stated.get(pair[0]) else None for pair in pairs]
        prefix, lattice = "lilicorr_", None
        if stated.get("projector_type") == "lilicorr":
            lattice = {key.removeprefix(prefix): value for key, value in stated.items() if key.startswith(prefix)}
        return cls(found[0], found[1], lattice, InTurn.read(stated))  # type: ignore[arg-type]

    def shapes(
        self, num_layers: int, width: int, drafts: int, vocab_size: int, columns: int
    ) -> dict[str, tuple[int, ...]]:
        """Names and shapes of their tensors; ``columns`` are the tokens that can be drafted."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.convolution is not None:
            taps, group = self.convolution
            for at in (f"layers.{i}.{place}_conv" for i in range(num_layers) for place in ("attention", "mlp")):
                shapes[f"{at}.base_kernel"] = (2, taps, width)
                shapes[f"{at}.kernel_projection.weight"] = (2 * taps * width // group, width)
        if self.selector is not None:
            rank, at = self.selector[0], "candidate_selector"
            shapes |= {f"{at}.{side}_codebook": (vocab_size, rank) for side in ("predecessor", "successor")}
            shapes[f"{at}.hidden_projection.weight"] = (rank, width)
        if self.lattice is not None:
            own = _lattice_shapes(self.lattice, width, drafts)
            shapes |= {f"lilicorr.{name}": shape for name, shape in own.items()}
        return shapes | ({} if self.in_turn is None else self.in_turn.shapes(width, drafts, vocab_size, columns))


def _lattice_shapes(stated: Mapping[str, Any], width: int, drafts: int) -> dict[str, tuple[int, ...]]:
    h, f = stated["hidden_size"] or width, stated["factor_dim"]
    inner, heads = int(h * stated["mlp_ratio"]), stated["num_heads"]
    linear = {
        **{name: (h, width) for name in ("pass_hidden_proj", "context_proj")},
        **{"feature_mlp.1": (h, 5), "feature_mlp.3": (h, h), "factor_input_proj": (h, 3 * h)},
        **{name: (f, h) for name in ("out_head", "in_head", "anchor_out_head")},
    }
    if h != width:
        linear["token_proj"] = (h, width)
    shapes: dict[str, tuple[int, ...]] = {
        "feature_mlp.0.weight": (5,),
        "feature_mlp.0.bias": (5,),
        "slot_embedding": (1, 1, drafts, 1, h),
        "rank_embedding": (1, 1, 1, stated["candidate_topk"], h),
        "relative_slot_bias": (heads, 2 * drafts + 1),
        "same_slot_bias": (heads,),
        "output_norm.weight": (h,),
        "anchor_norm.weight": (h,),
    }
    for i in range(stated["num_layers"]):
        linear |= {
            f"layers.{i}.attn.out_proj": (h, h),
            f"layers.{i}.mlp.0": (inner, h),
            f"layers.{i}.mlp.2": (h, inner),
        }
        shapes |= {f"layers.{i}.{name}_norm.weight": (h,) for name in ("attn", "mlp")}
        shapes |= {f"layers.{i}.attn.in_proj_weight": (3 * h, h), f"layers.{i}.attn.in_proj_bias": (3 * h,)}
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def convolved(
    weights: Weights, at: str, convolution: tuple[int, int], x: Float[Tensor, "K H"]
) -> tuple[Float[Tensor, "K H"], Callable[[Tensor], Tensor]]:
    """What the sublayer reads [K H], and what is done to what it gives, [K H] to [K H]."""
    taps, group = convolution
    base = weights[f"{at}.base_kernel"]
    delta = (x @ weights[f"{at}.kernel_projection.weight"].T).view(len(x), 2, taps, -1)

    def side(number: int, y: Tensor) -> Tensor:
        rows = []
        for slot in range(len(y)):
            total = torch.zeros_like(y[slot])
            for tap in range(min(taps, slot + 1)):
                total = total + (base[number, tap] + delta[slot, number, tap].repeat_interleave(group)) * y[slot - tap]
            rows.append(total)
        return torch.stack(rows)

    return side(0, x), lambda found: side(1, found)


def selector_walk(
    weights: Weights, parts: Parts, hidden: Float[Tensor, "D H"], logits: Float[Tensor, "D v"], root: int
) -> list[int]:
    """Greedy: the best candidate of each slot, given the one of the slot before."""
    assert parts.selector is not None
    names = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
    before, after, projection = (weights[f"candidate_selector.{name}"] for name in names)
    drafts, last = [], root
    for state, law in zip(hidden, logits, strict=True):
        likely = law.topk(parts.selector[1])
        scores = likely.values + after[likely.indices] @ (before[last] * (projection @ state))
        last = int(likely.indices[scores.argmax()])
        drafts.append(last)
    return drafts


def lattice_walk(
    weights: Weights,
    parts: Parts,
    hidden: Float[Tensor, "D H"],
    logits: Float[Tensor, "D v"],
    boundary: Float[Tensor, " H"],
    embedding: Float[Tensor, "V H"],
    eps: float,
) -> list[int]:
    """Greedy: the best start, then the best pair each time."""
    c = parts.lattice
    assert c is not None
    own = {name.removeprefix("lilicorr."): value for name, value in weights.items() if name.startswith("lilicorr.")}

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ own[f"{name}.weight"].T + own[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * own[f"{name}.weight"]

    k, slots = c["candidate_topk"], len(hidden)
    laws, ids = logits.log_softmax(-1).topk(k)
    tokens = embedding.float()[ids]
    features = torch.zeros(slots, k, 5, device=hidden.device)
    features[..., 0], features[..., 1], features[..., 2] = laws, laws.exp(), laws - laws[:, :1]
    features[..., 3] = torch.arange(k, device=hidden.device) / max(1, k - 1)
    features[:, 0, 4] = 1.0
    read = F.layer_norm(features, (5,), own["feature_mlp.0.weight"], own["feature_mlp.0.bias"], 1e-5)
    x = linear("token_proj", tokens) if "token_proj.weight" in own else tokens
    x = x + linear("pass_hidden_proj", hidden)[:, None] + linear("feature_mlp.3", F.silu(linear("feature_mlp.1", read)))
    x = (x + own["slot_embedding"][0, 0, :slots] + own["rank_embedding"][0, 0]).flatten(0, 1)
    for i in range(c["num_layers"]):
        x = x + _attended(own, i, norm(f"layers.{i}.attn_norm", x), c["num_heads"], k)
        x = x + linear(f"layers.{i}.mlp.2", F.silu(linear(f"layers.{i}.mlp.0", norm(f"layers.{i}.mlp_norm", x))))
    x = norm("output_norm", x)
    u = norm("anchor_norm", linear("context_proj", boundary))
    g = F.silu(linear("factor_input_proj", torch.cat([x, u.expand_as(x), x * u], dim=-1)))

    def unit(name: str, y: Tensor) -> Tensor:
        y = linear(name, y)
        return y / y.norm(dim=-1, keepdim=True).clamp(min=c["vector_eps"])

    leaving, entering = unit("out_head", g).view(slots, k, -1), unit("in_head", g).view(slots, k, -1)
    last, drafts = unit("anchor_out_head", u), []
    for slot in range(slots):
        best = int((entering[slot] @ last).argmax())  # the scale changes no choice
        last = leaving[slot, best]
        drafts.append(int(ids[slot, best]))
    return drafts


def _attended(own: Weights, layer: int, x: Float[Tensor, "n h"], heads: int, k: int) -> Float[Tensor, "n h"]:
    """Head by head, with the bias looked up pair by pair."""
    at = f"layers.{layer}.attn"
    q, keys, v = (x @ own[f"{at}.in_proj_weight"].T + own[f"{at}.in_proj_bias"]).chunk(3, dim=-1)
    size, places = x.shape[-1] // heads, torch.arange(len(x), device=x.device) // k
    table, middle = own["relative_slot_bias"], own["relative_slot_bias"].shape[1] // 2
    found = []
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        scores = q[:, part] @ keys[:, part].T / math.sqrt(size)
        scores = scores + table[head, places[:, None] - places[None] + middle]
        scores = scores + own["same_slot_bias"][head] * (places[:, None] == places[None])
        found.append(scores.softmax(-1) @ v[:, part])
    return torch.cat(found, dim=-1) @ own[f"{at}.out_proj.weight"].T + own[f"{at}.out_proj.bias"]
