"""Contract of drafters that need the token before a slot to run it: one forward per draft."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from jaxtyping import Int
from torch import Tensor

from dflash_lightning.drafter.base import Drafter
from dflash_lightning.ops.context import ContextState

# ``advance(state, slots [B, W, H], depth) -> (hidden [B, W, H], state)``
Advance = Callable[[Any, Tensor, int], tuple[Tensor, Any]]


class SequentialDrafter(Drafter):
    """A drafter whose slots hold the true tokens in training, and the drafted ones in decoding.

    ``forward`` serves training: all slots of a block are known, so they may run at once. ``begin`` serves decoding.
    Both give a slot the same hidden state where the tokens before it are the same; a test holds them together.
    """

    inputs = "tokens"

    @abstractmethod
    def begin(self, positions: Int[Tensor, "B 1"], context: ContextState) -> tuple[Any, Advance]:
        """A state of one lane per row, and ``advance(state, slots, depth)`` that goes on from it.

        ``positions`` are those of the roots, one per row. ``advance`` is called with the roots' slots ``[B, 1, H]`` at
        depth 0, then with those of ``W`` lanes per row at depths 1, 2, ... It returns the hidden states ``[B, W, H]``
        from which the next token is drawn, and the state after them. A state is made of tensors ``[B, W, ...]`` (see
        ``types.gather_lanes``) and never changed in place. New rows of the context are taken in here, once.
        """
