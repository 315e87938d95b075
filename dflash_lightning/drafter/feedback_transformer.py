"""A drafter that reads its own output where the target's feature is missing (EAGLE-3, arXiv 2503.01840)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.drafter.causal_transformer import CausalTransformer
from dflash_lightning.drafter.layer import DraftLayer
from dflash_lightning.drafter.sequential import Advance
from dflash_lightning.ops.context import ContextState, KVSource


class FeedbackTransformer(CausalTransformer):
    """Slot ``k`` of a block is fed ``W [e(x_{a+k}); f_k]``: its token, and a feature of the position before.

    ``f_0`` is the target's own, the fused feature of position ``a - 1``. Those of later positions do not exist when a
    block is drafted, so ``f_k`` is the drafter's hidden state of slot ``k - 1``. Training does the same ("training-time
    test"): it runs the slots of a block in turn, with the true tokens, and gradients flow back through all of them.

    Positions: slot 0 is what the context's row ``a - 1`` is, so it stands at position ``a - 1``, and slot ``k`` at
    ``a - 1 + k``. Step ``k`` sees the context rows before ``a - 1`` and its own chain, slots ``0 .. k``. Row ``a - 1``
    itself is left out, since slot 0 is that row. Context rows pass the layer's input norm, as slots do: so a row has
    the keys and values that slot 0 of the block after it has.

    RECONSTRUCTED: what is fed back is the hidden state after the output norm, the one that the language head reads; the
    released code feeds back what comes before that norm. There the inputs are joined by widened projections, here by
    one ``W`` as in the paper. With more than one layer (the paper has one), every layer projects the same context rows.
    """

    name = "feedback_transformer"
    needs = frozenset({"boundary", "join"})

    def forward(
        self, slots: Float[Tensor, "B N K H"], positions: Int[Tensor, "B N K"], context: ContextState
    ) -> Float[Tensor, "B N K H"]:
        sources, feature, chains = self.sources(context), context.boundary(), None
        found = []
        for slot in range(slots.shape[2]):
            joined = context.join(slots[:, :, slot], feature).to(slots.dtype)
            feature, chains = self.run_slot(joined, positions[:, :, slot] - 1, sources, chains)
            found.append(feature)
        return torch.stack(found, dim=2)

    def units(self) -> list[nn.Module]:
        return []  # slots are run in turn, by ``DraftLayer.step``

    def begin(self, positions: Int[Tensor, "B 1"], context: ContextState) -> tuple[Any, Advance]:
        sources = self.sources(context)

        def advance(state: Any, slots: Tensor, depth: int) -> tuple[Tensor, Any]:
            feature, chains = state
            joined = context.join(slots, feature).to(slots.dtype)
            hidden, chains = self.run_slot(joined, positions + depth - 1, sources, chains, dense=True)
            return hidden, (hidden, chains)

        return (context.boundary().clone(), None), advance

    def sources(self, context: ContextState) -> list[list[KVSource]]:
        found = [context.sources(layer.index, NormedRows(layer)) for layer in self._layers()]
        return [[_without_last_row(source) for source in sources] for sources in found]


@dataclass(frozen=True)
class NormedRows:
    """A layer's attention for context rows that pass its input norm first (see ``ops.context.ContextAttention``)."""

    layer: DraftLayer

    def project(
        self, states: Float[Tensor, "B R H"], positions: Int[Tensor, "B R"]
    ) -> tuple[Float[Tensor, "B R Hkv D"], Float[Tensor, "B R Hkv D"]]:
        """Keys, rotated to ``positions``, and values of ``states`` after the layer's input norm."""
        return self.layer.self_attn.project(self.layer.input_layernorm(states), positions)

    def finish_keys(self, k: Float[Tensor, "B R Hkv D"], positions: Int[Tensor, "B R"]) -> Float[Tensor, "B R Hkv D"]:
        """``k`` normed and rotated to ``positions``."""
        return self.layer.self_attn.finish_keys(k, positions)


def _without_last_row(source: KVSource) -> KVSource:
    """The context of a chain whose slot 0 is the last row that the block may see."""
    end = torch.maximum(source.start, source.end - 1)
    return replace(source, end=end, slot_row=source.slot_row - 1, masks=None)
