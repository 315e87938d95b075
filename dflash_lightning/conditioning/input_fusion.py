"""Target features fused into the inputs of slots and context (an ablation of DFlash, arXiv 2602.06036 sec. 7.2)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dflash_lightning.conditioning.base import BOUNDARY, Rows
from dflash_lightning.conditioning.kv_injection import INIT_STD, FusedFeatures
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.ops.context import ContextState
from dflash_lightning.ops.language_head import LanguageHead
from dflash_lightning.types import FeatureSpec, TargetFeatures


class InputFusion(FusedFeatures):
    """Slots and context rows are ``W [e; C]`` of a token's embedding and a feature state, as in EAGLE-3.

    Context row ``j`` is ``W [e(x_{j+1}); C_j]``: the feature of position ``j`` beside the token after it, which at
    decoding is the new root for the last row. Slots have no features of their own, so every slot takes that of the
    last row before the block, ``W [e(slot); C_{a-1}]`` (zeros in its place where a block starts a document). Draft
    layers attend to the context rows by their own projections.

    RECONSTRUCTED: the paper compares KV injection with input fusion and does not spell out the latter for a block of
    masks. ``C`` is KV injection's; with ``W`` at random (deviation 0.02) training starts from inputs close to zero, so
    a warm start makes ``W [e; C] = e + C`` besides that noise.
    """

    name = "input_fusion"
    provides = frozenset({BOUNDARY})

    def build(self, config: DraftConfig) -> None:
        super().build(config)
        self.fuse_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        nn.init.normal_(self.fuse_proj.weight, std=INIT_STD)

    @torch.no_grad()
    def warm_start(self, layers: Mapping[int, Mapping[str, Tensor]]) -> None:
        super().warm_start(layers)
        weight = self.fuse_proj.weight
        weight += torch.eye(len(weight), device=weight.device).repeat(1, 2)

    def required(self) -> FeatureSpec:
        return super().required() | FeatureSpec(tokens=True)

    def rows(self, features: TargetFeatures, lm: LanguageHead) -> Rows:
        assert features.next_ids is not None, "input fusion reads the token after each row"
        states = self.fuse(features.select(self._layer_ids))
        return Rows(self.join(lm.embed(features.next_ids), states), boundary=states)

    def slot_inputs(self, embeddings: Float[Tensor, "B N K H"], context: ContextState) -> Float[Tensor, "B N K H"]:
        joined = self.join(embeddings, context.boundary()[:, :, None].expand_as(embeddings))
        return joined.to(embeddings.dtype)  # what layers add to is not rounded under autocast

    def join(self, embeddings: Float[Tensor, "*rows H"], states: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows H"]:
        return self.fuse_proj(torch.cat([embeddings.to(states.dtype), states], dim=-1))
