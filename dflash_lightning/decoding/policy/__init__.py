"""Policies: how much of a draft the target judges."""

from dflash_lightning.decoding.policy.base import WidthPolicy

__all__ = ["WidthPolicy"]
