"""The prefix read by an encoder of the drafter's own, instead of features of the target."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_lightning.conditioning.base import DecodingRows, RowConditioning, Rows, TrainingRows
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.errors import SettingError
from dflash_lightning.geometry import LayerGeometry
from dflash_lightning.ops.block_attention import block_attention
from dflash_lightning.ops.context import ContextState, KVSource, make_kv_cache, write_kv
from dflash_lightning.ops.language_head import LanguageHead
from dflash_lightning.ops.norm import RMSNorm
from dflash_lightning.ops.rotary import Rotation, make_rotation, norm_and_rotate
from dflash_lightning.types import BlockLayout, FeatureSpec, TargetFeatures

INIT_STD = 0.02
# Keys and values of a layer's rows to the source that these rows read: the rows before each.
Source = Callable[[int, Tensor, Tensor], KVSource]


class TokenContext(RowConditioning):
    """Context row ``j`` is what a small causal transformer makes of the tokens ``x_0 .. x_j``.

    The transformer reads the target's embedding rows, is trained with the drafter, and stands in the place of
    ``RMSNorm(fc([h_1; ..; h_T]))``: every draft layer projects its output to keys and values. No hidden state of the
    target is read.

    RECONSTRUCTED (an ablation of DFlash, arXiv 2602.06036 sec. 7.2): the paper does not say what its drafter without
    target features sees of the prompt. This is the reading in which it reads the prompt's tokens itself; in
    ``NullConditioning`` it does not. Depth and kind of the encoder are ours. Its layers have the sizes of the draft
    layers, with SwiGLU and q/k norms.
    """

    name = "token_context"
    taps_layers = False

    def __init__(self, *, num_layers: int = 1) -> None:  # of the encoder
        super().__init__()
        if num_layers < 1:
            raise SettingError("conditioning.num_layers", f"{num_layers} encodes nothing", "Use 1 or more")
        self.num_layers = num_layers
        self.target_layer_ids = []

    def default_layer_ids(self, num_target_layers: int) -> list[int]:
        return []

    def build(self, config: DraftConfig) -> None:
        geometry = config.geometry
        self._theta, self._head_dim = geometry.rope_theta, geometry.head_dim
        self._offset = config.num_hidden_layers  # the encoder's buffers follow those of the draft layers
        self.layers = nn.ModuleList(EncoderLayer(geometry) for _ in range(self.num_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def required(self) -> FeatureSpec:
        return FeatureSpec(tokens=True)

    def rows(self, features: TargetFeatures, lm: LanguageHead) -> Rows:
        raise NotImplementedError("a row depends on the rows before it: see encode")

    def prepare(
        self, features: TargetFeatures, position_ids: Int[Tensor, "B S"], layout: BlockLayout, lm: LanguageHead
    ) -> ContextState:
        row = torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(position_ids)
        start = row - position_ids  # positions restart with every document of a packed row

        def source(layer: int, k: Tensor, v: Tensor) -> KVSource:
            return KVSource(k, v, start, row, row)

        states = self.encode(features, position_ids, source, lm, dense=False)
        return TrainingRows(self, Rows(states), position_ids, layout)

    def make_cache(
        self, config: DraftConfig, *, batch_size: int, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """Keys and values of the draft layers, then those of the encoder's."""
        shape = (batch_size, num_rows, config.num_key_value_heads, config.head_dim)
        return make_kv_cache(config.num_hidden_layers + self.num_layers, shape, dtype=dtype, device=device)

    def extend(
        self,
        features: TargetFeatures,
        first: Int[Tensor, " B"],
        keep: Int[Tensor, " B"],
        cache: dict[str, Tensor],
        lm: LanguageHead,
    ) -> ContextState:
        """The new rows may hold rejected tokens behind ``keep``: no row before them reads those."""
        row = first[:, None] + torch.arange(features.hidden.shape[1], device=first.device)

        def source(layer: int, k: Tensor, v: Tensor) -> KVSource:
            keys, values = write_kv(cache, self._offset + layer, row, k, v)
            return KVSource(keys, values, torch.zeros_like(row), row, row)

        states = self.encode(features, row, source, lm, dense=True)
        return DecodingRows(self, states, first, first + keep, cache)

    def encode(
        self,
        features: TargetFeatures,
        positions: Int[Tensor, "B R"],
        source: Source,
        lm: LanguageHead,
        *,
        dense: bool,
    ) -> Float[Tensor, "B R H"]:
        """States of all rows; ``source(layer, k, v)`` says which rows before it each of them reads."""
        assert features.ids is not None, "the encoder reads the token of each row"
        states = lm.embed(features.ids).to(self.norm.weight.dtype)
        rotation = make_rotation(positions, theta=self._theta, head_dim=self._head_dim, dtype=states.dtype)
        for index, layer in enumerate(self.layers):
            states = layer(states, rotation, lambda k, v, i=index: source(i, k, v), dense)
        return self.norm(states)


class EncoderLayer(nn.Module):
    """A causal decoder layer over tokens: pre-norm attention and SwiGLU."""

    def __init__(self, geometry: LayerGeometry) -> None:
        super().__init__()
        width, inner, self.head_dim = geometry.hidden_size, geometry.intermediate_size, geometry.head_dim
        heads, kv_heads = geometry.num_attention_heads, geometry.num_key_value_heads

        def linear(inputs: int, outputs: int) -> nn.Linear:
            made = nn.Linear(inputs, outputs, bias=False)
            nn.init.normal_(made.weight, std=INIT_STD)
            return made

        self.input_layernorm = RMSNorm(width, eps=geometry.rms_norm_eps)
        self.q_proj, self.o_proj = linear(width, heads * self.head_dim), linear(heads * self.head_dim, width)
        self.k_proj, self.v_proj = (linear(width, kv_heads * self.head_dim) for _ in range(2))
        self.q_norm, self.k_norm = (RMSNorm(self.head_dim, eps=geometry.rms_norm_eps) for _ in range(2))
        self.post_attention_layernorm = RMSNorm(width, eps=geometry.rms_norm_eps)
        self.gate_proj, self.up_proj, self.down_proj = linear(width, inner), linear(width, inner), linear(inner, width)

    def forward(
        self,
        x: Float[Tensor, "B R H"],
        rotation: Rotation,
        source: Callable[[Tensor, Tensor], KVSource],
        dense: bool,
    ) -> Float[Tensor, "B R H"]:
        """[B, R, H] to the same. Every row is a block of one slot: it reads its source and itself."""
        normed = self.input_layernorm(x)
        q, k, v = (
            project(normed).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = norm_and_rotate(q, self.q_norm, rotation), norm_and_rotate(k, self.k_norm, rotation)
        out = block_attention(
            q[:, :, None],
            k[:, :, None],
            v[:, :, None],
            [source(k, v)],
            causal=True,
            window=None,
            scale=self.head_dim**-0.5,
            dense=dense,
        )
        x = x + self.o_proj(out.flatten(2))
        normed = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
