"""A backbone whose last layer is one of the target's own: the smallest use of ``Drafter.bind``."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.drafter.block_transformer import BlockTransformer
from dflash_lightning.drafter.bound_layer import BoundLayer
from dflash_lightning.errors import SettingError
from dflash_lightning.geometry import LayerGeometry
from dflash_lightning.ops.context import ContextState
from dflash_lightning.ops.rotary import make_rotation
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import TargetFacts


class TargetTail(BlockTransformer):
    """The layers of ``BlockTransformer``, then a decoder layer of the target, then the output norm.

    OURS, no published method: it shows what drafters inside the target (FlexDraft, PEFT-BD, GravityOCR) need of the
    framework. The target's layer is run by reference. It stays frozen, costs no memory, and is in no file of the
    drafter. It sees the block alone; context reaches it through the drafter's own layers. It looks at the whole block,
    or, with ``is_causal``, at slots that are not behind. A window of its own is not applied: blocks are shorter.
    """

    name = "target_tail"

    def __init__(
        self,
        *,
        target_layer: int | None = None,  # 0-based layer of the target that is run; null: the last
        num_layers: int = 5,  # draft layers before it
        intermediate_size: int | None = None,  # of their feed-forward part; null: the target's
        num_heads: int | None = None,  # query heads; null: the target's
        num_kv_heads: int | None = None,  # key-value heads; null: the target's
        head_dim: int | None = None,  # null: the target's
        rope_parameters: dict[str, Any] | None = None,
        layer_types: list[str] | None = None,  # full_attention or sliding_attention per layer; null: all full
        sliding_window: int | None = None,  # positions that sliding layers see
        is_causal: bool | None = None,
        rms_norm_eps: float | None = None,  # null: the target's
        init_from_target: bool = False,  # start the draft layers from the target's layers before target_layer
        qk_norm_gain: float = 1.0,  # at which q/k norms start where the target has none
        init_std: float = 0.02,  # of weights that start at random
    ) -> None:
        super().__init__(
            num_layers=num_layers,
            intermediate_size=intermediate_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope_parameters=rope_parameters,
            layer_types=layer_types,
            sliding_window=sliding_window,
            is_causal=is_causal,
            rms_norm_eps=rms_norm_eps,
            init_from_target=init_from_target,
            qk_norm_gain=qk_norm_gain,
            init_std=init_std,
        )
        self.target_layer = target_layer
        self.tail: BoundLayer | None = None

    def geometry(self, facts: TargetFacts) -> LayerGeometry:
        if self.target_layer is not None and not 0 <= self.target_layer < facts.num_layers:
            raise SettingError(
                "drafter.target_layer",
                f"{self.target_layer} is no layer of {facts.name}",
                f"Use a number from 0 to {facts.num_layers - 1}, or null for the last",
            )
        return super().geometry(facts)

    def build(self, config: DraftConfig) -> None:
        super().build(config)
        self._causal = bool(config.is_causal)
        self._made_for = config.target.get("digest")

    def bind(self, target: FrozenTarget) -> None:
        if self._made_for not in (None, target.facts.digest):
            raise SettingError(
                "draft",
                f"it runs a layer of the target it was made for (digest of the weights {self._made_for}), but "
                f"{target.facts.name} has {target.facts.digest}",
                do="Give the target it was made for",
            )
        self.tail = BoundLayer(target, self._tail_index(target.facts.num_layers))

    def forward(
        self, slots: Float[Tensor, "B N K H"], positions: Int[Tensor, "B N K"], context: ContextState
    ) -> Float[Tensor, "B N K H"]:
        assert self.tail is not None, "bind comes before the first forward"
        rotation = make_rotation(positions, theta=self._theta, head_dim=self._head_dim, dtype=slots.dtype)
        for layer in self.layers:
            slots = layer(slots, rotation, context)
        return self.norm(self.tail(slots, positions, causal=self._causal))

    def warm_start_layers(self, num_target_layers: int) -> list[int]:
        """The layers right before the target's own one, so that the drafter begins as a run of the target's layers."""
        if not self.init_from_target:
            return []
        last = self._tail_index(num_target_layers)
        if self.num_layers > last:
            raise SettingError(
                "drafter.num_layers",
                f"{self.num_layers} layers cannot start from the {last} layers of the target before layer {last}",
                "Use fewer, or set init_from_target=false",
            )
        return list(range(last - self.num_layers, last))

    def _tail_index(self, num_target_layers: int) -> int:
        return num_target_layers - 1 if self.target_layer is None else self.target_layer
