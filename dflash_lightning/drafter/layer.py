"""One draft layer: a Qwen3-style decoder layer whose attention also reads target context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_lightning.geometry import SLIDING, LayerGeometry
from dflash_lightning.ops.block_attention import block_attention
from dflash_lightning.ops.chains import Chain, lengthen, visible_sources
from dflash_lightning.ops.context import ContextState, KVSource
from dflash_lightning.ops.fused import FusedSwiGLU, is_plain
from dflash_lightning.ops.norm import RMSNorm, norm_for_products, trains
from dflash_lightning.ops.rotary import Rotation, make_rotation, norm_and_rotate

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True)
class Pattern:
    """Who sees whom in one layer: ``causal`` inside the block, ``window`` in positions (null = all)."""

    causal: bool
    window: int | None

    @classmethod
    def of(cls, geometry: LayerGeometry, layer: int) -> Pattern:
        """``is_causal`` null goes by layer type as z-lab's code does: sliding layers are causal inside a block."""
        sliding = geometry.layer_types is not None and geometry.layer_types[layer] == SLIDING
        causal = sliding if geometry.is_causal is None else geometry.is_causal
        return cls(causal, geometry.sliding_window if sliding else None)


class BlockSelfAttention(nn.Module):
    """Queries from the block; keys and values from context and block through the same projections and key norm."""

    def __init__(self, geometry: LayerGeometry, layer: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = geometry.num_attention_heads, geometry.num_key_value_heads
        self.head_dim = geometry.head_dim
        self.theta = geometry.rope_theta
        self.pattern = Pattern.of(geometry, layer)
        width = geometry.hidden_size
        self.q_proj = nn.Linear(width, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, width, bias=False)
        self.q_norm = RMSNorm(self.head_dim, eps=geometry.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=geometry.rms_norm_eps)

    def keys_and_values(
        self, states: Float[Tensor, "*rows H"], rotation: Rotation
    ) -> tuple[Float[Tensor, "*rows Hkv D"], Float[Tensor, "*rows Hkv D"]]:
        """Normed, rotated keys and plain values."""
        k = self.k_proj(states).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(states).unflatten(-1, (self.num_kv_heads, self.head_dim))
        return norm_and_rotate(k, self.k_norm, rotation), v

    def project(
        self, states: Float[Tensor, "B R H"], positions: Int[Tensor, "B R"]
    ) -> tuple[Float[Tensor, "B R Hkv D"], Float[Tensor, "B R Hkv D"]]:
        """Keys and values of context states at absolute ``positions`` (see ``ContextAttention``)."""
        return self.keys_and_values(states, self._rotation(positions, states.dtype))

    def finish_keys(self, k: Float[Tensor, "B R Hkv D"], positions: Int[Tensor, "B R"]) -> Float[Tensor, "B R Hkv D"]:
        """Keys that the context projected by itself, with this layer's key norm and rotation."""
        return norm_and_rotate(k, self.k_norm, self._rotation(positions, k.dtype))

    def _rotation(self, positions: Int[Tensor, "B R"], dtype: torch.dtype) -> Rotation:
        return make_rotation(positions, theta=self.theta, head_dim=self.head_dim, dtype=dtype)

    def forward(
        self, x: Float[Tensor, "B N K H"], rotation: Rotation, sources: list[KVSource]
    ) -> Float[Tensor, "B N K H"]:
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        q = norm_and_rotate(q, self.q_norm, rotation)
        k, v = self.keys_and_values(x, rotation)
        out = block_attention(
            q, k, v, sources, causal=self.pattern.causal, window=self.pattern.window, scale=self.head_dim**-0.5
        )
        return self.o_proj(out.flatten(-2))

    def step(
        self,
        x: Float[Tensor, "B W H"],
        rotation: Rotation,
        sources: list[KVSource],
        chain: Chain | None,
        *,
        dense: bool,
    ) -> tuple[Float[Tensor, "B W H"], Chain]:
        """The next slot of ``W`` chains: what ``forward`` gives a causal block at that slot; see ``ops.chains``."""
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        q = norm_and_rotate(q, self.q_norm, rotation)
        k, v = self.keys_and_values(x, rotation)
        out = block_attention(
            q[:, :, None],
            k[:, :, None],
            v[:, :, None],
            visible_sources(sources, chain, x.shape[1]),
            causal=True,
            window=self.pattern.window,
            scale=self.head_dim**-0.5,
            dense=dense,
        )
        return self.o_proj(out[:, :, 0].flatten(-2)), lengthen(chain, k, v)


class SwiGLU(nn.Module):
    """``down(act(gate(x)) * up(x))``."""

    def __init__(self, geometry: LayerGeometry) -> None:
        super().__init__()
        width, inner = geometry.hidden_size, geometry.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act = ACTIVATIONS[geometry.hidden_act]

    def forward(self, x: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows H"]:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self._fuses(gate):
            return FusedSwiGLU.apply(gate, up, self.down_proj.weight.to(gate.dtype))
        return self.down_proj(self.act(gate) * up)

    def _fuses(self, gate: Float[Tensor, "*rows I"]) -> bool:
        plain = self.act is F.silu and is_plain(self.down_proj, nn.Linear) and self.down_proj.bias is None
        return plain and trains(gate, self.down_proj.weight)


class DraftLayer(nn.Module):
    """Pre-norm attention and MLP with residuals; the context itself gets no residual, MLP or output projection.

    ``fresh`` are how the names of weights begin that a decoder layer of a target does not have: they start by
    themselves where the others are copied.
    """

    fresh: ClassVar[tuple[str, ...]] = ()

    def __init__(self, geometry: LayerGeometry, layer: int) -> None:
        super().__init__()
        self.index = layer
        self.input_layernorm = RMSNorm(geometry.hidden_size, eps=geometry.rms_norm_eps)
        self.self_attn = BlockSelfAttention(geometry, layer)
        self.post_attention_layernorm = RMSNorm(geometry.hidden_size, eps=geometry.rms_norm_eps)
        self.mlp = SwiGLU(geometry)

    def forward(
        self, x: Float[Tensor, "B N K H"], rotation: Rotation, context: ContextState
    ) -> Float[Tensor, "B N K H"]:
        sources = context.sources(self.index, self.self_attn)
        x = x + self.self_attn(norm_for_products(x, self.input_layernorm), rotation, sources)
        return x + self.mlp(norm_for_products(x, self.post_attention_layernorm))

    def step(
        self,
        x: Float[Tensor, "B W H"],
        rotation: Rotation,
        sources: list[KVSource],
        chain: Chain | None,
        *,
        dense: bool,
    ) -> tuple[Float[Tensor, "B W H"], Chain]:
        """The next slot of ``W`` chains per row, and the chains with it."""
        out, chain = self.self_attn.step(self.input_layernorm(x), rotation, sources, chain, dense=dense)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), chain

    @torch.no_grad()
    def initialise(self, *, std: float, qk_norm_gain: float) -> None:
        """Normal weights with deviation ``std``; gains of the query and key norms."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)
        self.self_attn.q_norm.weight.fill_(qk_norm_gain)
        self.self_attn.k_norm.weight.fill_(qk_norm_gain)
