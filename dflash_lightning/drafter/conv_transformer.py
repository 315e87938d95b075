"""The backbone of DFlash 2 (z-lab): DFlash's, whose slots also mix by short convolutions."""

from __future__ import annotations

from typing import Any

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.drafter.base import check_kernel
from dflash_lightning.drafter.block_transformer import BlockTransformer
from dflash_lightning.drafter.conv_layer import ConvLayer
from dflash_lightning.drafter.layer import DraftLayer
from dflash_lightning.errors import SettingError
from dflash_lightning.geometry import LayerGeometry


class ConvTransformer(BlockTransformer):
    """The layers of ``BlockTransformer`` with grouped dynamic causal convolutions around attention and MLP.

    A slot reads ``kernel_size - 1`` slots before its own, so a shorter block is the same function of the slots it has
    (as far as attention is). Starts as the same drafter without convolutions, bit for bit. From MT 3.4 and MH 2.1: the
    released model's code and settings (kernel 2, groups of 16); its training is not published.
    """

    name = "conv_transformer"
    initial = BlockTransformer.initial | {"projection_std"}

    def __init__(
        self,
        *,
        kernel_size: int = 2,  # slots that a convolution reads: its own and those before
        group_size: int = 16,  # neighbouring features that share what the input adds to a tap
        projection_std: float = 0.0,  # of the weights that make these additions; 0 starts as no convolution
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
        if kernel_size < 1:
            raise SettingError("drafter.kernel_size", f"{kernel_size} reads no slot", "Use 1 or more (DFlash 2 uses 2)")
        if group_size < 1:
            raise SettingError("drafter.group_size", f"{group_size} is no group", "Use 1 or more (DFlash 2 uses 16)")
        self.kernel_size = kernel_size
        self.group_size = group_size
        self.projection_std = projection_std

    def check_slots(self, num_slots: int) -> None:
        check_kernel("drafter.kernel_size", self.kernel_size, num_slots)

    def build(self, config: DraftConfig) -> None:
        if config.hidden_size % self.group_size:
            raise SettingError(
                "drafter.group_size",
                f"{self.group_size} does not divide the drafter's width {config.hidden_size}",
                "Use a divisor of it",
            )
        super().build(config)

    def make_layer(self, geometry: LayerGeometry, index: int) -> DraftLayer:
        return ConvLayer(
            geometry, index, taps=self.kernel_size, group=self.group_size, projection_std=self.projection_std
        )
