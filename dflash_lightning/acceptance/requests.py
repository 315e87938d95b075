"""What is asked of every slot: the chance that its draft is the text's own token, and that it does not stand at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.acceptance.rule import AcceptanceRule
from dflash_lightning.decoding.law import Law
from dflash_lightning.ops.language_head import LanguageHead
from dflash_lightning.ops.requests import Chunk, Request


@dataclass(frozen=True, eq=False)
class Standing(Request):
    """``A``: the chance that a slot's draft is its label and stands. ``target_probs`` are the served law's own."""

    rule: AcceptanceRule
    labels: Int[Tensor, "B N K"]
    target_probs: Float[Tensor, "B N K"]
    differentiable: ClassVar[bool] = False

    def value(self, chunk: Chunk) -> Float[Tensor, " r"]:
        drafted = _draft_law(self.rule, chunk).of(chunk.pick(self.labels)[None])[0]
        return self.rule.stands(chunk.pick(self.target_probs), drafted)


@dataclass(frozen=True, eq=False)
class Rejection(Request):
    """``c``: the chance that a slot's draft does not stand where the text goes on: one over tokens, not of the label.

    ``hidden`` are the target's last hidden states, ``rows`` the one before each slot's label, ``stops`` the ids at
    which decoding ends: a drafted stop token saves no round.
    """

    rule: AcceptanceRule
    hidden: Float[Tensor, "S H"]
    rows: Int[Tensor, "B N K"]
    lm: LanguageHead
    stops: Int[Tensor, " E"]
    differentiable: ClassVar[bool] = False

    @property
    def columns(self) -> int:
        return 3 * len(self.lm.weight)

    def value(self, chunk: Chunk) -> Float[Tensor, " r"]:
        which, place = chunk.pick(self.rows).unique(return_inverse=True)
        width = len(self.lm.weight)
        laws = self.rule.sampler.law(self.lm.logits(self.hidden[which])).dense(width)
        ending = laws[:, self.stops].sum(-1)
        laws[:, self.stops] = 0.0
        laws /= (1.0 - ending).clamp_min(torch.finfo(laws.dtype).tiny)[:, None]
        target = laws[place]
        stands = self.rule.stands(target, _draft_law(self.rule, chunk).dense(width)[0])
        return (target * (1.0 - stands)).sum(-1)


def _draft_law(rule: AcceptanceRule, chunk: Chunk) -> Law:
    return chunk.remember(("law", rule), lambda: rule.slot_law(chunk.logits[None], chunk.head.ids))
