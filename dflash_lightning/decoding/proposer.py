"""Proposers: where drafts come from. Plain decoding is the proposer that drafts nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Int
from torch import Tensor

from dflash_lightning.decoding.types import Scores
from dflash_lightning.types import FeatureSpec, TargetFeatures


class Proposer(ABC):
    """Drafts ``num_drafts`` tokens after each root. It always drafts them all: shapes are static, cuts come later.

    Called by the loop under no_grad: ``start`` once per batch, then ``propose`` and ``ingest`` in turn.
    """

    num_drafts: int
    compiled: bool = False

    def required(self) -> FeatureSpec:
        """Target features that ``start`` and ``ingest`` read."""
        return FeatureSpec()

    @abstractmethod
    def start(self, features: TargetFeatures, lengths: Int[Tensor, " B"], roots: Int[Tensor, " B"]) -> None:
        """Forget the last batch and take in the prompts: the first ``lengths[b]`` rows of ``features``.

        ``roots`` are the tokens after them, which the first ``propose`` drafts behind.
        """

    @abstractmethod
    def propose(self, roots: Int[Tensor, " B"]) -> Scores:
        """Scores for the tokens after ``roots``, the last committed tokens, whose features do not exist yet."""

    @abstractmethod
    def ingest(self, features: TargetFeatures, keep: Int[Tensor, " B"]) -> None:
        """Take in the first ``keep[b]`` rows of what the target computed at root and drafts (0 for ended rows).

        ``features.next_ids`` of the last kept row is the root of the next round.
        """


class NoDrafts(Proposer):
    """Drafts nothing, which makes the loop decode plainly."""

    num_drafts = 0

    def start(self, features: TargetFeatures, lengths: Int[Tensor, " B"], roots: Int[Tensor, " B"]) -> None:
        pass

    def propose(self, roots: Int[Tensor, " B"]) -> Scores:
        return Scores(torch.empty(len(roots), 0, 1, device=roots.device))

    def ingest(self, features: TargetFeatures, keep: Int[Tensor, " B"]) -> None:
        pass
