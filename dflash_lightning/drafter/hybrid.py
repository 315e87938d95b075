"""The backbone of H-Spec (arXiv 2609.24197): state layers, attention on the target's keys and values, and MLPs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.drafter.base import Drafter, check_kernel
from dflash_lightning.drafter.layer import BlockSelfAttention, SwiGLU
from dflash_lightning.drafter.state_layer import StateLayer, StateShape
from dflash_lightning.drafter.warm_start import check_source
from dflash_lightning.errors import SettingError
from dflash_lightning.geometry import SLIDING, LayerGeometry
from dflash_lightning.layer_ids import kv_layer_ids
from dflash_lightning.ops.context import ContextState
from dflash_lightning.ops.norm import RMSNorm
from dflash_lightning.ops.rotary import check_rope, make_rotation
from dflash_lightning.types import TargetFacts

STATE, ATTENTION, MLP = "M", "A", "F"


class HybridDrafter(Drafter):
    """Sublayers with a residual each: ``M`` a state layer, ``A`` attention, ``F`` an MLP.

    Their order is ``lead``, then ``num_layers`` times ``group``; the published one is ``MF MAF MAF MAF``.

    State layers begin from one state per block, a projection of the context's boundary that all of them share. The
    ``j``-th attention reads context layer ``j``; its heads and rotation are the target's. ``init_from_target`` starts
    it from the target's layer whose keys and values it reads (conditioning ``kv_layer_ids``). ``qk_norm`` false leaves
    the norms of queries and keys out, for targets without them (Llama).

    RECONSTRUCTED: the first weights of state layers are Mamba-2's; slots see their whole block in attention.
    """

    name = "hybrid"
    needs = frozenset({"boundary"})
    initial = frozenset({"init_from_target", "qk_norm_gain", "init_std"})

    def __init__(
        self,
        *,
        num_layers: int = 3,  # groups of sublayers; each reads one layer of the context
        lead: str = "MF",  # sublayers before the groups
        group: str = "MAF",  # sublayers of a group, one of them attention
        state_heads: int = 48,  # of a state layer
        state_head_dim: int = 64,  # features of such a head
        state_states: int = 4,  # numbers that are kept per feature
        state_groups: int = 4,  # of heads that share what is written and read
        state_kernel: int = 4,  # slots of the convolution before the scan
        intermediate_size: int | None = None,  # of the MLPs; null: the target's
        sliding_window: int | None = None,  # positions that attention sees; null: all
        is_causal: bool = False,  # whether attention hides later slots of the block
        qk_norm: bool = True,  # norms of queries and keys, where the target has them
        rms_norm_eps: float | None = None,  # null: the target's
        init_from_target: bool = False,  # start attention from the target's layers that it reads
        qk_norm_gain: float = 1.0,  # at which q/k norms start where the target has none
        init_std: float = 0.02,  # of weights that start at random
    ) -> None:
        super().__init__()
        if num_layers < 1:
            raise SettingError("drafter.num_layers", f"{num_layers} reads no context", "Use 1 or more (H-Spec uses 3)")
        if {*lead} - {STATE, MLP}:
            raise SettingError("drafter.lead", f"{lead!r} has other letters", f"Use {STATE} and {MLP}, or nothing")
        if {*group} - {STATE, MLP, ATTENTION} or group.count(ATTENTION) != 1:
            raise SettingError(
                "drafter.group", f"{group!r} is no group of sublayers", f"Use {STATE} and {MLP}, and {ATTENTION} once"
            )
        if sliding_window is not None and sliding_window < 1:
            raise SettingError("drafter.sliding_window", f"{sliding_window} sees nothing", "Use 1 or more, or null")
        self.num_layers = num_layers
        self.lead, self.group = lead, group
        self.state_heads, self.state_head_dim, self.state_states = state_heads, state_head_dim, state_states
        self.state_groups, self.state_kernel = state_groups, state_kernel
        self.intermediate_size = intermediate_size
        self.sliding_window = sliding_window
        self.is_causal = is_causal
        self.qk_norm = qk_norm
        self.rms_norm_eps = rms_norm_eps
        self.init_from_target = init_from_target
        self.qk_norm_gain = qk_norm_gain
        self.init_std = init_std
        self._shape = StateShape(state_heads, state_head_dim, state_states, state_groups, state_kernel)

    def check_slots(self, num_slots: int) -> None:
        check_kernel("drafter.state_kernel", self.state_kernel, num_slots)

    def geometry(self, facts: TargetFacts) -> LayerGeometry:
        if self.init_from_target:
            check_source(facts)
        types = None if self.sliding_window is None else [SLIDING] * self.num_layers
        rope = {
            "rope_type": "default",
            "rope_theta": check_rope(facts.rope_parameters, where=f"drafter ({facts.name})"),
        }
        return LayerGeometry.of(
            facts, {**vars(self), "hidden_act": "silu", "rope_parameters": rope, "layer_types": types}
        )

    def build(self, config: DraftConfig) -> None:
        geometry, width = config.geometry, config.hidden_size
        self._theta, self._head_dim = geometry.rope_theta, geometry.head_dim
        stated = config.components.get("conditioning", {}).get("settings", {}).get("kv_layer_ids")
        assert config.num_target_layers is not None
        self._sources = kv_layer_ids(stated, config.num_target_layers, self.num_layers)
        self.seed_proj = nn.Linear(width, self._shape.size, bias=False) if STATE in self._kinds else None
        self.layers = nn.ModuleList()
        for kind in self._kinds:
            if kind == ATTENTION:
                index = sum(isinstance(layer, AttentionLayer) for layer in self.layers)
                self.layers.append(AttentionLayer(geometry, index, qk_norm=self.qk_norm))
            else:
                self.layers.append(
                    StateLayer(width, self._shape, eps=geometry.rms_norm_eps) if kind == STATE else MLPLayer(geometry)
                )
        self.norm = RMSNorm(width, eps=config.rms_norm_eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.init_std)
        for layer in self.layers:
            if isinstance(layer, StateLayer):
                layer.initialise(std=self.init_std)
        if self.qk_norm:
            for attention in self._attentions():
                nn.init.constant_(attention.self_attn.q_norm.weight, self.qk_norm_gain)
                nn.init.constant_(attention.self_attn.k_norm.weight, self.qk_norm_gain)

    def forward(
        self, slots: Float[Tensor, "B N K H"], positions: Int[Tensor, "B N K"], context: ContextState
    ) -> Float[Tensor, "B N K H"]:
        rotation = make_rotation(positions, theta=self._theta, head_dim=self._head_dim, dtype=slots.dtype)
        seed = None if self.seed_proj is None else self.seed_proj(context.boundary().to(slots.dtype))
        for layer in self.layers:
            if isinstance(layer, AttentionLayer):
                sources = context.sources(layer.index, layer.self_attn)
                slots = slots + layer.self_attn(layer.input_layernorm(slots), rotation, sources)
            else:
                slots = layer(slots, seed) if isinstance(layer, StateLayer) else layer(slots)
        return self.norm(slots)

    def absorb(self, context: ContextState) -> None:
        for layer in self._attentions():
            context.sources(layer.index, layer.self_attn)

    def warm_start_layers(self, num_target_layers: int) -> list[int]:
        return self._sources if self.init_from_target else []

    @torch.no_grad()
    def warm_start(self, layers: list[Mapping[str, Tensor]]) -> None:
        for attention, source in zip(self._attentions(), layers, strict=True):
            attention.copy(source, where=f"drafter attention {attention.index}")

    @property
    def _kinds(self) -> str:
        return self.lead + self.num_layers * self.group

    def _attentions(self) -> Iterator[AttentionLayer]:
        return (layer for layer in self.layers if isinstance(layer, AttentionLayer))


class AttentionLayer(nn.Module):
    """Attention and its norm, with the names that a decoder layer of a target gives them; number ``index`` of them."""

    def __init__(self, geometry: LayerGeometry, index: int, *, qk_norm: bool) -> None:
        super().__init__()
        self.index = index
        self.input_layernorm = RMSNorm(geometry.hidden_size, eps=geometry.rms_norm_eps)
        self.self_attn: Any = BlockSelfAttention(geometry, index)
        if not qk_norm:
            self.self_attn.q_norm, self.self_attn.k_norm = nn.Identity(), nn.Identity()  # type: ignore[assignment]

    def copy(self, source: Mapping[str, Tensor], *, where: str) -> None:
        """Take the weights of a target's layer, its MLP aside.

        Raises:
            ValueError: its attention has other weights than this one, or of other shapes.
        """
        own = self.state_dict()
        given = {name: value for name, value in source.items() if name.startswith(("self_attn.", "input_layernorm."))}
        optional = {name for name in own if name.endswith(("q_norm.weight", "k_norm.weight"))}
        unknown, missing = sorted(given.keys() - own.keys()), sorted(own.keys() - given.keys() - optional)
        misshapen = [name for name in given.keys() & own.keys() if given[name].shape != own[name].shape]
        if unknown or missing or misshapen:
            raise SettingError(
                "drafter.init_from_target",
                f"{where} cannot start from the target's layer: it has no place for {unknown}, finds no {missing}, and "
                f"{sorted(misshapen)} have other shapes",
                do="Set qk_norm as the target has it, or init_from_target=false",
            )
        for name, value in given.items():
            own[name].copy_(value)


class MLPLayer(nn.Module):
    """An MLP with its norm and residual."""

    def __init__(self, geometry: LayerGeometry) -> None:
        super().__init__()
        self.post_attention_layernorm = RMSNorm(geometry.hidden_size, eps=geometry.rms_norm_eps)
        self.mlp = SwiGLU(geometry)

    def forward(self, x: Float[Tensor, "B N K H"]) -> Float[Tensor, "B N K H"]:
        return x + self.mlp(self.post_attention_layernorm(x))
