"""Trial of token trees with a target of a family that the test suite does not hold."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.ops.plain_mode import plain_mode
from dflash_lightning.target.frozen import FrozenTarget
from dflash_lightning.target.intact import TAIL, probe_length, token_errors, typical_error
from dflash_lightning.types import TargetFeatures

_PARENTS = [0, 0, 0, 2, 3]  # a root, two siblings, and a chain of two after the second of them
_WAY = [0, 2, 3, 4]  # from the root to the end of that chain; node 1 stands in the cache between them
PROBE_POSITIONS = 1 + len(_WAY)  # a prompt of one token, and the way


@runtime_checkable
class TreeJudge(Protocol):
    """What the check asks: ``TargetAdapter`` is one."""

    def prefill(self, prompts: list[list[int]]) -> tuple[Float[Tensor, "B V"], TargetFeatures, Int[Tensor, " B"]]:
        """Take in prompts: the logits after each, the features of all positions [B S], and the lengths."""

    def verify(self, tokens: Int[Tensor, "B N"], *, parents: Int[Tensor, "B N"]) -> Float[Tensor, "B N V"]:
        """The logits after each node of a tree."""


def tree_error(judge: TreeJudge, target: FrozenTarget) -> float:
    """Relative difference between a small tree's logits and those of plain forwards over its longest way.

    The tree is judged in a ragged batch of two, one row past the target's window or chunk where that is small. The
    error is that of a typical node after the first of two siblings (see ``intact.typical_error``): these nodes might
    see that sibling, or stand one position too far.
    """
    facts = target.facts
    long = max(1, probe_length(target.model.config, facts.max_positions) - len(_WAY))
    ids = [(37 * i + 3) % facts.vocab_size for i in range(long)]
    texts = [ids, ids[:TAIL]]
    tokens = torch.tensor([[(17 * k + 5 * b + 1) % facts.vocab_size for k in range(len(_PARENTS))] for b in range(2)])
    judge.prefill(texts)
    found = judge.verify(tokens, parents=torch.tensor([_PARENTS, _PARENTS]))
    errors = []
    for text, row, logits in zip(texts, tokens, found, strict=True):
        expected = _plain_logits(target, text + row[_WAY].tolist())[-len(_WAY) :]
        errors.append(token_errors(logits[_WAY], expected))
    return max(typical_error(some, [slice(1, None)]) for some in errors)


def _plain_logits(target: FrozenTarget, text: list[int]) -> Float[Tensor, "S V"]:
    with plain_mode(target.device):
        return target.model(input_ids=torch.tensor([text], device=target.device), use_cache=False).logits[0]
