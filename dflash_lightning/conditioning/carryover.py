"""States of rejected drafts as temporary context of the next round (Carryover Drafting, arXiv 2609.14717)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dflash_lightning.conditioning.base import Rows
from dflash_lightning.conditioning.kv_injection import FusedFeatures
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.errors import SettingError
from dflash_lightning.ops.context import ContextAttention, ContextState, KVSource
from dflash_lightning.ops.language_head import LanguageHead
from dflash_lightning.types import Carried, TargetFeatures


class Carryover(FusedFeatures):
    """KV injection that also reads what the target computed at the drafts which the round before rejected.

    RECONSTRUCTED from the paper's abstract, with low confidence: neither its text nor its code was seen. The abstract
    says that the states pass through the projections that are there, that *one* learned embedding marks them, and that
    they are temporary context, replaced every round. Here a rejected draft at position ``i`` gives
    ``hidden_norm(fc(F_i)) + e``, with ``e`` zero at the start. Every draft layer projects it with its own key and value
    projections, at position ``i``. All slots of the new block see it, under one softmax with context and block. It
    never enters the draft cache. These points are open, and decided here:

    - the embedding is added after the norm;
    - the state of the first rejected draft is carried too, though the new root stands at its position;
    - a round in which all drafts stand carries nothing, and neither does one that drafted a tree.

    It is no identity at the start: the further keys take attention from the others. The abstract starts from a trained
    DFlash, and so can this one: its weights have the same names (``init_from.change: [conditioning]``).
    """

    name = "carryover"
    carries = True
    initial = frozenset({"num_features", "fresh"})

    def __init__(
        self,
        *,
        target_layer_ids: list[int] | None = None,  # 0-based target layers that are read; null spaces them evenly
        num_features: int = 5,  # how many, where target_layer_ids is null
        fresh: float = 0.25,  # share of training documents whose blocks have no round before, as after a prompt
    ) -> None:
        super().__init__(target_layer_ids=target_layer_ids, num_features=num_features)
        if not 0.0 <= fresh < 1.0:
            raise SettingError(
                "conditioning.fresh",
                f"{fresh} is no share of documents that leaves any to carry",
                "Use a number from 0 to below 1",
            )
        self.fresh = fresh

    def build(self, config: DraftConfig) -> None:
        super().build(config)
        self.rejected = nn.Parameter(torch.zeros(config.hidden_size))

    def rows(self, features: TargetFeatures, lm: LanguageHead) -> Rows:
        return Rows(self.fuse(features.select(self.required().layer_ids)))

    def carry(self, context: ContextState, carried: Carried) -> ContextState:
        states = self.fuse(carried.features.select(self.required().layer_ids))
        return _WithRejected(context, states + self.rejected.to(states.dtype), carried)


@dataclass
class _WithRejected(ContextState):
    """A context with one more source beside its own."""

    context: ContextState
    states: Float[Tensor, "B R H"]
    carried: Carried

    def sources(self, layer: int, attention: ContextAttention) -> list[KVSource]:
        carried = self.carried
        k, v = attention.project(self.states, carried.positions)
        rejected = KVSource(k, v, carried.start, carried.end, carried.start)
        return [*self.context.sources(layer, attention), rejected]

    def slot_inputs(self, embeddings: Float[Tensor, "B N K H"]) -> Float[Tensor, "B N K H"]:
        return self.context.slot_inputs(embeddings)

    def boundary(self) -> Float[Tensor, "B N C"]:
        return self.context.boundary()
