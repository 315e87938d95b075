"""A draft layer whose slots also mix with the slots before them: short convolutions around attention and MLP."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dflash_lightning.drafter.layer import DraftLayer
from dflash_lightning.geometry import LayerGeometry
from dflash_lightning.ops.chains import Chain
from dflash_lightning.ops.context import ContextState, KVSource
from dflash_lightning.ops.rotary import Rotation

IN, OUT = 0, 1


class SlotConvolution(nn.Module):
    """Causal convolutions over the slots of a block, one on what a sublayer reads and one on what it gives.

    Tap ``o`` of side ``i`` weighs the slot ``o`` places before by ``base[i, o] + delta[i, o]``. ``base`` is a weight
    per feature; ``delta`` is computed at every slot from the sublayer's own input, one number for ``group``
    neighbouring features. In front of slot 0 of a block there is nothing. Both sides take ``delta`` of the same input,
    the one before the first convolution. Starts as the identity, exactly: tap 0 is 1, all others and ``delta`` are 0
    (``projection_std`` 0).
    """

    def __init__(self, width: int, *, taps: int, group: int) -> None:
        super().__init__()
        self.taps, self.group = taps, group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)

    @torch.no_grad()
    def initialise(self, *, projection_std: float) -> None:
        """The identity, but for ``projection_std``."""
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1.0
        nn.init.normal_(self.kernel_projection.weight, std=projection_std)

    def deltas(self, x: Float[Tensor, "B N K H"]) -> Float[Tensor, "B N K two taps groups"]:
        """What the input adds to the taps of both sides."""
        return self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))

    def forward(
        self, x: Float[Tensor, "B N K H"], deltas: Float[Tensor, "B N K two taps groups"], side: int
    ) -> Float[Tensor, "B N K H"]:
        """The convolution of one side."""
        grouped, base = x.unflatten(-1, (-1, self.group)), self.base_kernel[side].unflatten(-1, (-1, self.group))
        mixed = grouped * (base[0] + deltas[..., side, 0, :, None])
        for tap in range(1, self.taps):
            before = nn.functional.pad(grouped, (0, 0, 0, 0, tap, 0))[..., : x.shape[-2], :, :]
            mixed = mixed + before * (base[tap] + deltas[..., side, tap, :, None])
        return mixed.flatten(-2).to(x.dtype)


class ConvLayer(DraftLayer):
    """A draft layer with ``SlotConvolution`` around its attention and its MLP, inside the residuals.

    Context keys and values are not convolved.
    """

    fresh = ("attention_conv.", "mlp_conv.")

    def __init__(self, geometry: LayerGeometry, layer: int, *, taps: int, group: int, projection_std: float) -> None:
        super().__init__(geometry, layer)
        self._projection_std = projection_std
        self.attention_conv = SlotConvolution(geometry.hidden_size, taps=taps, group=group)
        self.mlp_conv = SlotConvolution(geometry.hidden_size, taps=taps, group=group)

    def forward(
        self, x: Float[Tensor, "B N K H"], rotation: Rotation, context: ContextState
    ) -> Float[Tensor, "B N K H"]:
        sources = context.sources(self.index, self.self_attn)
        read = self.input_layernorm(x)
        deltas = self.attention_conv.deltas(read)
        found = self.self_attn(self.attention_conv(read, deltas, IN), rotation, sources)
        x = x + self.attention_conv(found, deltas, OUT)
        read = self.post_attention_layernorm(x)
        deltas = self.mlp_conv.deltas(read)
        return x + self.mlp_conv(self.mlp(self.mlp_conv(read, deltas, IN)), deltas, OUT)

    def step(
        self,
        x: Float[Tensor, "B W H"],
        rotation: Rotation,
        sources: list[KVSource],
        chain: Chain | None,
        *,
        dense: bool,
    ) -> tuple[Float[Tensor, "B W H"], Chain]:
        raise NotImplementedError("a chain of slots does not keep what the convolutions read of the slots before")

    @torch.no_grad()
    def initialise(self, *, std: float, qk_norm_gain: float) -> None:
        super().initialise(std=std, qk_norm_gain=qk_norm_gain)
        for convolution in (self.attention_conv, self.mlp_conv):
            convolution.initialise(projection_std=self._projection_std)
