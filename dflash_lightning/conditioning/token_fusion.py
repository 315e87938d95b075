"""Context rows of a token and the feature before it, for drafters that join such inputs themselves (EAGLE-3)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from dflash_lightning.conditioning.base import BOUNDARY, JOIN
from dflash_lightning.conditioning.input_fusion import InputFusion
from dflash_lightning.ops.context import ContextState


class TokenFusion(InputFusion):
    """Context row ``j`` is ``W [e(x_{j+1}); C_j]``; slots are fed their embeddings alone (EAGLE-3, arXiv 2503.01840).

    ``C`` fuses low, middle and high target layers, ``RMSNorm(fc([h_low; h_mid; h_high]))``. A slot has no target
    feature of its own. Its drafter puts something in the place of ``C`` and joins the two by the same ``W`` (``join``):
    the last row's ``C`` (``boundary``) for the first slot, then its own output.

    RECONSTRUCTED: the paper has one linear layer over ``[e; g]``. Released code norms both halves and widens the
    layer's projections to twice the width instead. The norm over ``fc`` is DFlash's.
    """

    name = "token_fusion"
    provides = frozenset({BOUNDARY, JOIN})

    def __init__(
        self,
        *,
        target_layer_ids: list[int] | None = None,  # 0-based target layers that are read; null spaces them evenly
        num_features: int = 3,  # how many, where target_layer_ids is null: low, middle and high
    ) -> None:
        super().__init__(target_layer_ids=target_layer_ids, num_features=num_features)

    def slot_inputs(self, embeddings: Float[Tensor, "B N K H"], context: ContextState) -> Float[Tensor, "B N K H"]:
        return embeddings
