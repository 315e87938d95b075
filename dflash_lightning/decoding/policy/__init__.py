"""Policies: how much of a draft the target judges."""

from dflash_lightning.decoding.policy.base import WidthPolicy
from dflash_lightning.decoding.policy.confidence import ConfidencePolicy
from dflash_lightning.decoding.policy.length import LengthPolicy
from dflash_lightning.decoding.policy.shared_budget import SharedBudget

__all__ = ["ConfidencePolicy", "LengthPolicy", "SharedBudget", "WidthPolicy"]
