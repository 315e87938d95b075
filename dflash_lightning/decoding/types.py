"""Values that pass between the parts of the decoding loop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dflash_lightning.decoding.law import Law
from dflash_lightning.decoding.repetition import repeats_itself
from dflash_lightning.ops.ancestry import ancestors_or_self
from dflash_lightning.types import Scores

__all__ = ["Draft", "Drawn", "Generation", "Round", "Scores", "Verdict"]

Drawn = Literal["delta", "noise", "sampled"]


@dataclass(frozen=True)
class Round:
    """Where the rows of a batch stand: request ids, the position of each row's root, and the number of the round.

    ``live`` says which rows are still decoded; only policies are told, null otherwise.
    """

    requests: Int[Tensor, " B"]
    positions: Int[Tensor, " B"]
    index: int
    live: Bool[Tensor, " B"] | None = None


@dataclass
class Draft:
    """Nodes for the target to judge in one pass: node 0 is the root, and parents precede their children.

    ``parents`` is null for a chain, where the parent of node ``k`` is node ``k - 1``; ``parents[:, 0]`` is 0. Siblings
    hold distinct tokens, in the order in which they were drawn. A node that is not ``live`` (padding, or cut by a
    policy) is never accepted; the ancestors of a live node are live. ``drawn`` says how the drafts were chosen:

    - ``delta``: by a rule without chance;
    - ``noise``: with the target's own keyed noise, which the target will choose with again;
    - ``sampled``: from ``law``. Row ``law_row[b, k]`` of ``law`` is then exactly the warped law that the children of
      node ``k`` were drawn from, one after another without replacement. ``law_row`` null means the depth of the node.

    No node is deeper than ``height``, where that is stated; the loop states it where counting would have to wait for
    the device.
    """

    tokens: Int[Tensor, "B N"]
    drawn: Drawn
    parents: Int[Tensor, "B N"] | None = None
    live: Bool[Tensor, "B N"] | None = None
    law: Law | None = None
    law_row: Int[Tensor, "B N"] | None = None
    height: int | None = None
    signals: dict[str, Tensor] = field(default_factory=dict)

    @property
    def depth(self) -> Int[Tensor, "B N"]:
        """Number of edges between the root and each node."""
        if self.parents is None:
            return torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)
        return ancestors_or_self(self.parents).sum(-1) - 1

    def cut(self, width: Int[Tensor, " B"]) -> Draft:
        """The same draft without its nodes deeper than ``width[b]``: they are no longer live."""
        within = self.depth <= width[:, None]
        return replace(self, live=within if self.live is None else self.live & within)

    def narrow(self, num_nodes: int) -> Draft:
        """The first ``num_nodes`` nodes; no other is live in any row. Rows of a chain's law go with its nodes."""
        if num_nodes == self.tokens.shape[1]:
            return self
        law = self.law
        if law is not None and self.parents is None and self.law_row is None:
            law = law.at((slice(None), slice(num_nodes - 1)))
        return replace(
            self,
            tokens=self.tokens[:, :num_nodes],
            parents=None if self.parents is None else self.parents[:, :num_nodes],
            live=None if self.live is None else self.live[:, :num_nodes],
            law=law,
            law_row=None if self.law_row is None else self.law_row[:, :num_nodes],
        )


@dataclass
class Verdict:
    """How many drafts of each row stand, which, and the target's own token after them.

    ``path`` lists the nodes that stand, root first: ``path[b, :accepted[b] + 1]``; what follows is filled up with valid
    nodes that mean nothing, up to the depth of the draft at most. Null means a chain: nodes 0, 1, 2 ... in order.
    ``offered`` is the deepest depth that was at risk: ``accepted + 1``, or ``accepted`` where the last node has no live
    child. A tree states both; for a chain the loop counts ``offered`` itself.
    ``acceptance`` and ``law`` are what chance decided on, where it did: the probability of accepting each draft given
    that the ones before it stand, and the law ``following`` was drawn from. Tests enumerate them; reports average them.
    ``rejected`` is set by the loop, for chains: how many live drafts do not stand. Null for a tree.
    """

    accepted: Int[Tensor, " B"]
    following: Int[Tensor, " B"]
    path: Int[Tensor, "B P"] | None = None
    offered: Int[Tensor, " B"] | None = None
    acceptance: Float[Tensor, "B D"] | None = None
    law: Law | None = None
    rejected: Int[Tensor, " B"] | None = None


@dataclass
class Generation:
    """What one prompt became.

    ``output_ids`` starts with the token that the prefill gives and ends with the first stop token or at the length
    limit; ``committed`` counts the tokens each round added after such cuts, so ``1 + sum(committed) ==
    len(output_ids)``. ``accepted`` is the verifier's count for the same rounds, before cuts; ``offered`` is the deepest
    depth that was at risk in each.
    """

    request: int
    output_ids: list[int]
    committed: list[int]
    accepted: list[int]
    finish: Literal["stop", "length"] | None = None
    offered: list[int] = field(default_factory=list)

    @property
    def repeats_itself(self) -> bool:
        """Whether the answer is a loop or says the same again and again; its stop token does not count."""
        ended = self.finish == "stop"
        return repeats_itself(self.output_ids[:-1] if ended else self.output_ids)
