"""Proposers: where drafts come from. Plain decoding is the proposer that drafts nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Int
from torch import Tensor

from dflash_lightning.decoding.types import Round, Verdict
from dflash_lightning.types import FeatureSpec, Scores, TargetFeatures


class Proposer(ABC):
    """Drafts ``num_drafts`` tokens after each root. It always drafts them all: shapes are static, cuts come later.

    Called by the loop under no_grad: ``start`` once per batch, then ``propose`` and ``ingest`` in turn. ``signals``
    names what its scores offer to policies, and ``signals_in_turn`` says that only their ``step`` does. ``keeps_state``
    says that this ``step`` keeps a state along a path.
    """

    num_drafts: int
    compiled: bool = False
    signals: tuple[str, ...] = ()
    signals_in_turn: bool = False
    keeps_state: bool = False

    def required(self) -> FeatureSpec:
        """Target features that ``start`` and ``ingest`` read."""
        return FeatureSpec()

    @abstractmethod
    def start(self, features: TargetFeatures, lengths: Int[Tensor, " B"], roots: Int[Tensor, " B"]) -> None:
        """Forget the last batch and take in the prompts: the first ``lengths[b]`` rows of ``features``.

        ``roots`` are the tokens after them, which the first ``propose`` drafts behind.
        """

    @abstractmethod
    def propose(self, roots: Int[Tensor, " B"], where: Round) -> Scores:
        """Scores for the tokens after ``roots``, the last committed tokens, whose features do not exist yet."""

    @abstractmethod
    def ingest(self, features: TargetFeatures, keep: Int[Tensor, " B"], verdict: Verdict) -> None:
        """Take in the first ``keep[b]`` rows of what the target computed at the root and the drafts that stand.

        ``keep[b]`` is ``verdict.accepted[b] + 1``, fewer where a stop token or a limit cut the round, and 0 for a row
        that had ended before it. ``features.next_ids`` of the last kept row is the root of the next round.

        Of a chain, the next ``verdict.rejected[b]`` rows are those of the drafts that were rejected, the first one
        first: what the target computed there, each after the drafts before it. So they do not know the token that the
        target wants in place of the first. They may be read until the next ``ingest``. The rows of drafts that a policy
        cut come behind, and mean nothing, because it depends on the batch whether they are there. Of a tree,
        ``verdict.rejected`` is null: its nodes off the path are gone.
        """

    def skip(self, features: TargetFeatures, keep: Int[Tensor, " B"]) -> None:
        """Take in a round that nothing was proposed for: the root's own row, where ``keep[b]`` is 1.

        The next call may be another ``skip``, or ``propose``.
        """
        raise NotImplementedError(f"{type(self).__name__} drafts in every round: decode without decoding.adaptive")


class NoDrafts(Proposer):
    """Drafts nothing, which makes the loop decode plainly."""

    num_drafts = 0

    def start(self, features: TargetFeatures, lengths: Int[Tensor, " B"], roots: Int[Tensor, " B"]) -> None:
        pass

    def propose(self, roots: Int[Tensor, " B"], where: Round) -> Scores:
        return Scores(torch.empty(len(roots), 0, 1, device=roots.device))

    def ingest(self, features: TargetFeatures, keep: Int[Tensor, " B"], verdict: Verdict) -> None:
        pass
