"""Decoding statistics as a torchmetrics metric: sums that Lightning reduces over ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from dflash_lightning.decoding.stats import DecodeStats


class SpeculativeMetric(Metric):
    """Accumulates ``DecodeStats`` over batches and ranks; ``compute`` returns those of everything seen.

    The states are sums, so the figures do not depend on how prompts are dealt out: a mean of the ranks' own ratios
    would.
    """

    full_state_update = False
    higher_is_better = True
    counts: Tensor
    reals: Tensor

    def __init__(self, num_drafts: int) -> None:
        super().__init__()
        self.num_drafts = num_drafts
        num_counts, num_reals = DecodeStats.sizes(num_drafts)
        self.add_state("counts", torch.zeros(num_counts, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("reals", torch.zeros(num_reals), dist_reduce_fx="sum")

    def update(self, stats: DecodeStats) -> None:
        """Add ``stats``."""
        if stats.num_drafts != self.num_drafts:
            raise ValueError(
                f"metric.num_drafts: {self.num_drafts}, but these rounds drafted {stats.num_drafts} tokens. "
                "Use one metric per draft length."
            )
        counts, reals = stats.tensors()
        self.counts += counts.to(self.counts.device)
        self.reals += reals.to(self.reals.device)

    def compute(self) -> DecodeStats:
        """The statistics of everything seen, on all ranks."""
        return DecodeStats.from_tensors(self.num_drafts, self.counts, self.reals)
