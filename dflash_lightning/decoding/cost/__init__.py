"""What a round costs, by the tokens that the target judges: measured, smoothed, kept, and weighed against drafts."""

from dflash_lightning.decoding.cost.book import CostBook
from dflash_lightning.decoding.cost.roofline import Roofline
from dflash_lightning.decoding.cost.stop import best_stop, first_stop, rates
from dflash_lightning.decoding.cost.table import CostTable
from dflash_lightning.decoding.cost.timer import RoundTimer

__all__ = ["CostBook", "CostTable", "Roofline", "RoundTimer", "best_stop", "first_stop", "rates"]
