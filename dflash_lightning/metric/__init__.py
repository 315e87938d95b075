"""Metrics that reduce over ranks."""

from dflash_lightning.metric.speculative import SpeculativeMetric

__all__ = ["SpeculativeMetric"]
