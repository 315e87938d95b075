"""The backbone of DFlash (arXiv 2602.06036 sec. 4.1): a few decoder layers over a block, named as z-lab names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.drafter.base import Drafter
from dflash_lightning.drafter.layer import ACTIVATIONS, DraftLayer
from dflash_lightning.drafter.warm_start import check_source, copy_layer
from dflash_lightning.errors import SettingError
from dflash_lightning.geometry import LAYER_TYPES, SLIDING, LayerGeometry
from dflash_lightning.ops.context import ContextState
from dflash_lightning.ops.norm import RMSNorm
from dflash_lightning.ops.rotary import check_rope, make_rotation
from dflash_lightning.types import TargetFacts


class BlockTransformer(Drafter):
    """Pre-norm decoder layers with per-head q/k norm, SwiGLU and plain rotary embedding.

    Null settings are the target's own, except ``rope_parameters``: null rotates the whole head plainly with the
    target's ``rope_theta`` and is written out in the config. Copying the target's RoPE would claim a scaling or a
    partial rotation that the drafter does not have. ``init_from_target`` starts every layer
    from one of the target's last layers; where those have no q/k norm, its gain starts at ``qk_norm_gain`` (1.5 learnt
    faster than 1.0 on SmolLM2). ``is_causal`` null means by layer type: sliding layers are causal inside a block, full
    ones are not.
    """

    name = "block_transformer"
    initial = frozenset({"init_from_target", "qk_norm_gain", "init_std"})

    def __init__(
        self,
        *,
        num_layers: int = 5,  # draft layers
        intermediate_size: int | None = None,  # of the feed-forward part; null: the target's
        num_heads: int | None = None,  # query heads; null: the target's
        num_kv_heads: int | None = None,  # key-value heads; null: the target's
        head_dim: int | None = None,  # null: the target's
        rope_parameters: dict[str, Any] | None = None,
        layer_types: list[str] | None = None,  # full_attention or sliding_attention per layer; null: all full
        sliding_window: int | None = None,  # positions that sliding layers see
        is_causal: bool | None = None,
        rms_norm_eps: float | None = None,  # null: the target's
        init_from_target: bool = False,  # start every layer from one of the target's last ones
        qk_norm_gain: float = 1.0,  # at which q/k norms start where the target has none
        init_std: float = 0.02,  # of weights that start at random
    ) -> None:
        super().__init__()
        self.num_layers = num_layers
        self.intermediate_size = intermediate_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.rope_parameters = rope_parameters
        self.layer_types = layer_types
        self.sliding_window = sliding_window
        self.is_causal = is_causal
        self.rms_norm_eps = rms_norm_eps
        self.init_from_target = init_from_target
        self.qk_norm_gain = qk_norm_gain
        self.init_std = init_std
        self._check()

    def geometry(self, facts: TargetFacts) -> LayerGeometry:
        if self.init_from_target:
            check_source(facts)
        activation = facts.hidden_act if self.init_from_target else "silu"
        own = LayerGeometry.of(facts, {**vars(self), "hidden_act": activation, "rope_parameters": self._rope(facts)})
        heads, kv_heads, head_dim = own.num_attention_heads, own.num_key_value_heads, own.head_dim
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise SettingError(
                "drafter.num_heads",
                f"{heads} query heads cannot share {kv_heads} key-value heads evenly",
                f"Use a multiple of num_kv_heads, or leave both null ({facts.num_heads} and {facts.num_kv_heads})",
            )
        if head_dim < 2 or head_dim % 2:
            raise SettingError(
                "drafter.head_dim", f"{head_dim} must be even and positive, because features rotate in pairs"
            )
        return own

    def build(self, config: DraftConfig) -> None:
        if config.hidden_act not in ACTIVATIONS:
            raise SettingError("hidden_act", f"{config.hidden_act!r} is unknown", f"Use one of {sorted(ACTIVATIONS)}")
        self._theta = check_rope(config.rope_parameters or {}, where="rope_parameters")
        self._head_dim = config.head_dim
        self.layers = nn.ModuleList(self.make_layer(config.geometry, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        for layer in self._layers():
            layer.initialise(std=self.init_std, qk_norm_gain=self.qk_norm_gain)

    def make_layer(self, geometry: LayerGeometry, index: int) -> DraftLayer:
        """Draft layer number ``index``, with weights that ``DraftLayer.initialise`` is about to set."""
        return DraftLayer(geometry, index)

    def forward(
        self, slots: Float[Tensor, "B N K H"], positions: Int[Tensor, "B N K"], context: ContextState
    ) -> Float[Tensor, "B N K H"]:
        rotation = make_rotation(positions, theta=self._theta, head_dim=self._head_dim, dtype=slots.dtype)
        for layer in self.layers:
            slots = layer(slots, rotation, context)
        return self.norm(slots)

    def units(self) -> list[nn.Module]:
        return list(self.layers)

    def absorb(self, context: ContextState) -> None:
        for layer in self._layers():
            context.sources(layer.index, layer.self_attn)

    def warm_start_layers(self, num_target_layers: int) -> list[int]:
        if not self.init_from_target:
            return []
        if self.num_layers > num_target_layers:
            raise SettingError(
                "drafter.num_layers",
                f"{self.num_layers} layers cannot start from a target of {num_target_layers}",
                "Use fewer, or set init_from_target=false",
            )
        return list(range(num_target_layers - self.num_layers, num_target_layers))

    @torch.no_grad()
    def warm_start(self, layers: list[Mapping[str, Tensor]]) -> None:
        for index, (layer, source) in enumerate(zip(self._layers(), layers, strict=True)):
            copy_layer(source, layer, where=f"drafter layer {index}")

    def _layers(self) -> list[DraftLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def _rope(self, facts: TargetFacts) -> dict[str, Any]:
        if self.rope_parameters is not None:
            theta = check_rope(self.rope_parameters, where="drafter.rope_parameters")
        else:
            # A family that rotates sliding and full layers differently states one entry per layer type.
            given = facts.rope_parameters.get("full_attention", facts.rope_parameters)
            theta = check_rope({"rope_theta": given.get("rope_theta")}, where=f"drafter.rope_parameters ({facts.name})")
        return {"rope_type": "default", "rope_theta": theta}

    def _check(self) -> None:
        if self.num_layers < 1:
            raise SettingError(
                "drafter.num_layers", f"{self.num_layers} is no network", "Use 1 or more (DFlash uses 5)"
            )
        types = self.layer_types if self.layer_types is not None else []
        unknown = sorted({*types} - {*LAYER_TYPES})
        if unknown:
            raise SettingError("drafter.layer_types", f"{unknown} are unknown", f"Use {list(LAYER_TYPES)}")
        if self.layer_types is not None and len(types) != self.num_layers:
            raise SettingError(
                "drafter.layer_types",
                f"{len(types)} entries for num_layers={self.num_layers}",
                "Give one per layer, or null",
            )
        sliding = SLIDING in types
        if sliding and (self.sliding_window is None or self.sliding_window < 1):
            raise SettingError(
                "drafter.sliding_window",
                f"{self.sliding_window} is no window for the sliding layers in layer_types",
                "Give a positive number of positions",
            )
        if self.sliding_window is not None and not sliding:
            raise SettingError(
                "drafter.sliding_window",
                f"{self.sliding_window} is used by no layer",
                do="Set layer_types with 'sliding_attention' where it should hold, or leave it null",
            )
