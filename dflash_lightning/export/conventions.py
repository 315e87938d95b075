"""A drafter's first blocks computed densely from an export's tensors, with every convention a named field.

This is the slow oracle of ``dflash check``: it shares no code with the drafter that is trained and decoded with, and a
convention that two implementations disagree about can be changed by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from dflash_lightning.export.parts import Parts, convolved, lattice_walk, selector_walk

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
NORMS = ("hidden_norm", "q_norm", "k_norm", "input_layernorm", "post_attention_layernorm", "norm")


@dataclass(frozen=True)
class Conventions:
    """Everything a first block's logits depend on besides weights and target.

    ``layer_ids`` are 0-based decoder layers (outputs). ``causal`` and ``windows`` have one entry per draft layer.
    ``scale`` multiplies attention scores. ``embedding_scale`` multiplies the target's raw embedding rows. The last
    fields are what implementations get wrong: norms left out, gains read as ``1 + weight`` (Gemma's habit), features
    rotated in neighbouring pairs instead of halves, only part of a head rotated, block positions that are off.
    """

    layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    rope_theta: float
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    scale: float
    eps: float
    vocab_size: int = 0
    draft_vocab_size: int | None = None
    activation: str = "silu"
    first_slot: int = 1
    embedding_scale: float = 1.0
    skipped_norms: frozenset[str] = frozenset()
    gain_offset: float = 0.0
    interleaved: bool = False
    rotary_share: float = 1.0
    position_offset: int = 0
    parts: Parts = field(default_factory=Parts)

    def but(self, **changes: Any) -> Conventions:
        """The same with some fields changed."""
        return replace(self, **changes)

    @property
    def num_layers(self) -> int:
        """Number of draft layers."""
        return len(self.causal)

    @property
    def num_drafts(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size - self.first_slot

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors: z-lab's, 3 + 11 per layer."""
        width, inner, head = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_heads * head, self.num_kv_heads * head
        layer = {
            "input_layernorm": (width,),
            "self_attn.q_proj": (q, width),
            "self_attn.k_proj": (kv, width),
            "self_attn.v_proj": (kv, width),
            "self_attn.o_proj": (width, q),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "post_attention_layernorm": (width,),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }
        shapes = {"fc": (width, len(self.layer_ids) * width), "hidden_norm": (width,), "norm": (width,)}
        shapes |= {f"layers.{i}.{name}": shape for i in range(self.num_layers) for name, shape in layer.items()}
        named = {f"{name}.weight": shape for name, shape in shapes.items()}
        columns = self.draft_vocab_size or self.vocab_size
        return named | self.parts.shapes(self.num_layers, width, self.num_drafts, self.vocab_size, columns)


@dataclass
class Drafting:
    """Weights of an export under z-lab's names, in fp32, and how they are to be read."""

    weights: Mapping[str, Tensor]
    conventions: Conventions

    def hidden(self, block: Float[Tensor, "K H"], context: Float[Tensor, "S T H"], anchor: int) -> Float[Tensor, "K H"]:
        """Hidden states of the block at position ``anchor``, ready for the language head.

        ``block`` holds the target's raw embedding rows of the block's tokens, ``context`` the tapped features of
        positions ``0 .. anchor - 1`` in the order of ``layer_ids``.
        """
        c = self.conventions
        states = self._norm(F.linear(context.float().flatten(1), self.weights["fc.weight"]), "hidden_norm")
        x = block.float() * c.embedding_scale
        slots = torch.arange(len(x), device=x.device)
        positions = torch.cat([torch.arange(len(states), device=x.device), anchor + c.position_offset + slots])
        for layer in range(c.num_layers):
            seen = self._visible(layer, anchor, len(x)).to(x.device)
            read, sides = self._sides(layer, "attention", self._norm(x, f"layers.{layer}.input_layernorm"))
            x = x + sides(self._attention(layer, read, states, positions, seen))
            read, sides = self._sides(layer, "mlp", self._norm(x, f"layers.{layer}.post_attention_layernorm"))
            x = x + sides(self._mlp(layer, read))
        return self._norm(x, "norm")

    def draft(
        self,
        hidden: Float[Tensor, "D H"],
        logits: Float[Tensor, "D v"],
        root: int,
        context: Float[Tensor, "S T H"],
        embedding: Float[Tensor, "V H"],
        ids: Int[Tensor, " v"] | None = None,
    ) -> list[int]:
        """Columns of the tokens that are drafted greedily, from what ``hidden`` gave for the slots that predict.

        ``ids`` are the tokens of the columns; null for all tokens in their order.
        """
        in_turn = self.conventions.parts.in_turn
        if in_turn is not None:
            return in_turn.walk(self.weights, hidden, logits, root, embedding, ids)
        if self.conventions.parts.selector is not None:
            return selector_walk(self.weights, self.conventions.parts, hidden, logits, root)
        if self.conventions.parts.lattice is not None:
            fused = F.linear(context[-1:].float().flatten(1), self.weights["fc.weight"])
            boundary = self._norm(fused, "hidden_norm")[0]
            return lattice_walk(self.weights, self.conventions.parts, hidden, logits, boundary, embedding, self._eps)
        return logits.argmax(-1).tolist()

    @property
    def _eps(self) -> float:
        return self.conventions.eps

    def _sides(
        self, layer: int, place: str, x: Float[Tensor, "K H"]
    ) -> tuple[Float[Tensor, "K H"], Callable[[Tensor], Tensor]]:
        """What a sublayer reads, and what is done to what it gives: nothing, or convolutions over slots."""
        taps = self.conventions.parts.convolution
        if taps is None:
            return x, lambda found: found
        return convolved(self.weights, f"layers.{layer}.{place}_conv", taps, x)

    def _attention(
        self,
        layer: int,
        x: Float[Tensor, "K H"],
        states: Float[Tensor, "S H"],
        positions: Int[Tensor, " n"],
        seen: Bool[Tensor, "K n"],
    ) -> Float[Tensor, "K H"]:
        c, at = self.conventions, f"layers.{layer}.self_attn"
        both = torch.cat([states, x])
        q = self._heads(x, f"{at}.q_proj", f"{at}.q_norm", positions[len(states) :])
        k = self._heads(both, f"{at}.k_proj", f"{at}.k_norm", positions)
        v = F.linear(both, self.weights[f"{at}.v_proj.weight"]).unflatten(-1, (c.num_kv_heads, c.head_dim))
        shared = c.num_heads // c.num_kv_heads
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * c.scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return F.linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), self.weights[f"{at}.o_proj.weight"])

    def _heads(self, x: Tensor, projection: str, norm: str, positions: Tensor) -> Float[Tensor, "n heads D"]:
        heads = F.linear(x, self.weights[f"{projection}.weight"]).unflatten(-1, (-1, self.conventions.head_dim))
        return self._rotate(self._norm(heads, norm), positions)

    def _rotate(self, x: Float[Tensor, "n heads D"], positions: Int[Tensor, " n"]) -> Float[Tensor, "n heads D"]:
        c = self.conventions
        width = int(c.head_dim * c.rotary_share) // 2 * 2
        turned, rest = x[..., :width], x[..., width:]
        exponents = torch.arange(0, width, 2, device=x.device).float() / width
        angles = positions[:, None, None] * c.rope_theta**-exponents
        cos, sin = angles.cos(), angles.sin()
        if c.interleaved:
            first, second = turned[..., ::2], turned[..., 1::2]
            pairs = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
            return torch.cat([pairs.flatten(-2), rest], dim=-1)
        first, second = turned.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    def _mlp(self, layer: int, x: Float[Tensor, "K H"]) -> Float[Tensor, "K H"]:
        at = f"layers.{layer}.mlp"
        gate = ACTIVATIONS[self.conventions.activation](F.linear(x, self.weights[f"{at}.gate_proj.weight"]))
        up = F.linear(x, self.weights[f"{at}.up_proj.weight"])
        return F.linear(gate * up, self.weights[f"{at}.down_proj.weight"])

    def _norm(self, x: Float[Tensor, "*rows size"], name: str) -> Float[Tensor, "*rows size"]:
        c = self.conventions
        if name.rpartition(".")[2] in c.skipped_norms:
            return x
        gain = self.weights[f"{name}.weight"] + c.gain_offset
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + c.eps) * gain

    def _visible(self, layer: int, anchor: int, block_size: int) -> Bool[Tensor, "K n"]:
        """Which of context and block each slot sees; windows count from the slot's own position, strictly."""
        q = anchor + torch.arange(block_size)[:, None]
        k = torch.arange(anchor + block_size)[None]
        seen = k <= q if self.conventions.causal[layer] else torch.ones(len(q), k.shape[1], dtype=torch.bool)
        window = self.conventions.windows[layer]
        return seen if window is None else seen & ((q - k).abs() < window)
