"""The backbone of DFlash run as an autoregressive drafter (its ablation DFlash-AR, arXiv 2602.06036 sec. 7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.drafter.block_transformer import BlockTransformer
from dflash_lightning.drafter.sequential import Advance, SequentialDrafter
from dflash_lightning.errors import SettingError
from dflash_lightning.geometry import LayerGeometry
from dflash_lightning.ops.chains import Chain
from dflash_lightning.ops.context import ContextState, KVSource
from dflash_lightning.ops.rotary import make_rotation
from dflash_lightning.types import TargetFacts


class CausalTransformer(BlockTransformer, SequentialDrafter):
    """The layers of ``BlockTransformer``, causal inside a block, over slots that hold true tokens.

    Slot ``i`` stands at the anchor's position plus ``i``, holds the token there and predicts the next one. All slots
    see the context before the anchor, and no slot sees a target feature of a later position: those do not exist when a
    block is drafted. Training is one forward per block, decoding one per draft, with the keys and values of the slots
    that a lane has run. So drafts cost as many forwards as there are.

    RECONSTRUCTED (MT 1.2): the paper names the ablation and spells out neither its labels nor its training. This is
    plain teacher forcing. ``is_causal`` may be null or true, which mean the same here.
    """

    name = "causal_transformer"

    def geometry(self, facts: TargetFacts) -> LayerGeometry:
        return replace(super().geometry(facts), is_causal=True)

    def begin(self, positions: Int[Tensor, "B 1"], context: ContextState) -> tuple[Any, Advance]:
        sources = self.sources(context)

        def advance(state: Any, slots: Tensor, depth: int) -> tuple[Tensor, Any]:
            return self.run_slot(slots, positions + depth, sources, state, dense=True)

        return None, advance

    def sources(self, context: ContextState) -> list[list[KVSource]]:
        """What every layer sees of the context; takes in its new rows."""
        return [context.sources(layer.index, layer.self_attn) for layer in self._layers()]

    def absorb(self, context: ContextState) -> None:
        self.sources(context)

    def run_slot(
        self,
        slots: Float[Tensor, "B W H"],
        positions: Int[Tensor, "B w"],
        sources: list[list[KVSource]],
        chains: Sequence[Chain] | None,
        *,
        dense: bool = False,
    ) -> tuple[Float[Tensor, "B W H"], tuple[Chain, ...]]:
        """The next slot of ``W`` chains through all layers; ``chains`` hold what each layer keeps, null at slot 0.

        ``positions`` are per chain, or one per row. ``dense`` is for a few chains, as in decoding.
        """
        where = positions.expand(slots.shape[:2])
        rotation = make_rotation(where, theta=self._theta, head_dim=self._head_dim, dtype=slots.dtype)
        kept = []
        for index, layer in enumerate(self._layers()):
            chain = None if chains is None else chains[index]
            slots, chain = layer.step(slots, rotation, sources[index], chain, dense=dense)
            kept.append(chain)
        return self.norm(slots), tuple(kept)

    def _check(self) -> None:
        super()._check()
        if self.is_causal is False:
            raise SettingError(
                "drafter.is_causal",
                f"false, but slots of {self.name!r} are run one after the other and cannot see later ones",
                do="Leave it null, or use the drafter block_transformer",
            )
