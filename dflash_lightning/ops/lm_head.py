"""The frozen language head, asked per-slot questions in chunks so that full logits never exist in training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass
class LanguageHead:
    """The target's output projection: ``logits = cap(scale * (weight @ h + bias))``.

    ``ids`` is null for the full vocabulary; otherwise row ``j`` of ``weight`` stands for token ``ids[j]`` (sorted).
    ``softcap`` c means ``c * tanh(x / c)``, applied last. The rows are the target's own, so nothing here is trained;
    gradients flow through to the hidden states.
    """

    weight: Float[Tensor, "V H"]
    bias: Float[Tensor, " V"] | None = None
    scale: float = 1.0
    softcap: float | None = None
    ids: Int[Tensor, " V"] | None = None

    def restrict(self, ids: Int[Tensor, " v"]) -> LanguageHead:
        """The same head over the tokens ``ids`` only (a copy of their rows)."""
        raise NotImplementedError

    def logits(self, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows V"]:
        """Full logits, in the dtype of the weight; for decoding and tests."""
        raise NotImplementedError


class View:
    """One draft distribution per slot, known by hidden rows; answers requests about them, chunk by chunk."""
