"""Drafts of the round before as a memory of the slots that stand where they stood (ReTrace, arXiv 2608.29748)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dflash_lightning.conditioning.base import Rows
from dflash_lightning.conditioning.kv_injection import INIT_STD, FusedFeatures
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.errors import SettingError
from dflash_lightning.ops.context import ContextAttention, ContextState, KVSource
from dflash_lightning.ops.language_head import LanguageHead
from dflash_lightning.types import Carried, FeatureSpec, TargetFeatures


class ReTrace(FusedFeatures):
    """KV injection whose mask slots are also told what the round before had drafted at their positions.

    Of the drafts of a round the accepted ones and the first rejected one are dropped: the new block starts there. Each
    further one stands at the position of a slot of the new block. For this slot, with the embedding ``e`` of its mask::

        m   the drafter's last (normed) hidden state that the draft was taken from
        u   the target's last (normed) hidden state that judged the draft, after the drafts before it
        r   = m + beta W_c [m; u]
        e'  = e + (W_v r) * sigmoid(W_g [e; r])

    ``W_v`` starts at 0, so that the drafter begins as the DFlash drafter it was. ``beta`` rises from 0 to 1 over the
    first ``warmup`` optimizer steps; it is kept with the weights. The slot of the root and slots without a draft of
    the round before are fed their embeddings, unchanged. One round is remembered, never more. A draft that a policy
    cut was never judged: it is not remembered.

    From a port that quotes the paper's appendices (MH 4.3). RECONSTRUCTED: the initial deviation of ``W_c`` and
    ``W_g``; training on one played round per block (``training.rounds``) instead of chains of real rounds; memory in
    the precision of the features, where the port keeps half precision. A tree leaves no memory: no source covers it.
    """

    name = "retrace"
    carries = True
    recalls = True
    initial = frozenset({"num_features", "fresh", "warmup"})

    def __init__(
        self,
        *,
        target_layer_ids: list[int] | None = None,  # 0-based target layers that are read; null spaces them evenly
        num_features: int = 5,  # how many, where target_layer_ids is null
        fresh: float = 0.25,  # share of training documents whose blocks have no round before, as after a prompt
        warmup: int = 50,  # optimizer steps over which beta rises from 0 to 1; 0: 1 at once
    ) -> None:
        super().__init__(target_layer_ids=target_layer_ids, num_features=num_features)
        if not 0.0 <= fresh < 1.0:
            raise SettingError(
                "conditioning.fresh",
                f"{fresh} is no share of documents that leaves any to carry",
                "Use a number from 0 to below 1",
            )
        if warmup < 0:
            raise SettingError("conditioning.warmup", f"{warmup} is no number of steps", "Use 0 or more (50)")
        self.fresh = fresh
        self.warmup = warmup

    beta: Tensor

    def build(self, config: DraftConfig) -> None:
        super().build(config)
        width = config.hidden_size
        self._first_slot = config.alignment.first_slot
        self.combine = nn.Linear(width + config.target_hidden_size, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(2 * width, width, bias=False)
        for linear in (self.combine, self.gate):
            nn.init.normal_(linear.weight, std=INIT_STD)
        nn.init.zeros_(self.value.weight)
        self.register_buffer("beta", torch.zeros(()))

    def required(self) -> FeatureSpec:
        return FeatureSpec(layer_ids=self._layer_ids, last_hidden=True)

    def rows(self, features: TargetFeatures, lm: LanguageHead) -> Rows:
        return Rows(self.fuse(features.select(self._layer_ids)))

    def at_step(self, step: int) -> None:
        self.beta.fill_(1.0 if self.warmup == 0 else min(1.0, step / self.warmup))

    def carry(self, context: ContextState, carried: Carried) -> ContextState:
        return _Remembering(context, self, carried)

    def recall(self, embeddings: Float[Tensor, "B N K H"], carried: Carried) -> Float[Tensor, "B N K H"]:
        """The slots' inputs, where there is a memory for a slot with it."""
        judged, drafted = carried.features.last_hidden, carried.recalled
        assert judged is not None and drafted is not None, "a round is remembered with the states of both models"
        if not judged.shape[1]:
            return embeddings
        row, live = self.remembered(carried, embeddings.shape[2])

        def of(states: Float[Tensor, "B R C"]) -> Float[Tensor, "B N K C"]:
            found = states.gather(1, row.flatten(1)[..., None].expand(-1, -1, states.shape[-1]))
            return torch.where(live[..., None], found.view(*row.shape, -1).to(embeddings.dtype), 0.0)

        return torch.where(live[..., None], self.fuse_memory(embeddings, of(drafted), of(judged)), embeddings)

    def remembered(self, carried: Carried, num_slots: int) -> tuple[Int[Tensor, "B N K"], Bool[Tensor, "B N K"]]:
        """The carried row from which the draft at each slot's position was judged, and whether there is one."""
        slots = torch.arange(num_slots, device=carried.start.device)
        row = carried.start[..., None] + slots - self._first_slot
        # Nothing was drafted after the last row, and slot 0 holds the root.
        live = (slots > 0) & (slots >= self._first_slot) & (row < carried.end[..., None] - 1)
        return row.clamp(0, carried.positions.shape[1] - 1), live

    def fuse_memory(
        self,
        embeddings: Float[Tensor, "*slots H"],
        drafted: Float[Tensor, "*slots H"],
        judged: Float[Tensor, "*slots Ht"],
    ) -> Float[Tensor, "*slots H"]:
        """``e'`` of the class's formula, for every slot."""
        beta = self.beta.to(embeddings.dtype)
        memory = drafted + beta * self.combine(torch.cat([drafted, judged], dim=-1)).to(embeddings.dtype)
        share = self.gate(torch.cat([embeddings, memory], dim=-1)).sigmoid()
        return embeddings + (self.value(memory) * share).to(embeddings.dtype)


@dataclass
class _Remembering(ContextState):
    """A context whose slots are also told of the round before."""

    context: ContextState
    part: ReTrace
    carried: Carried

    def sources(self, layer: int, attention: ContextAttention) -> list[KVSource]:
        return self.context.sources(layer, attention)

    def slot_inputs(self, embeddings: Float[Tensor, "B N K H"]) -> Float[Tensor, "B N K H"]:
        return self.part.recall(self.context.slot_inputs(embeddings), self.carried)

    def boundary(self) -> Float[Tensor, "B N C"]:
        return self.context.boundary()
