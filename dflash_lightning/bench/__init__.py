"""The bench: methods measured alike, swept over settings and seeds, and compared with how sure a difference is.

Names load on first use (``lazy.py``): the points of a sweep are looked at without torch.
"""

from typing import TYPE_CHECKING

from dflash_lightning.lazy import lazy_names

if TYPE_CHECKING:
    from dflash_lightning.bench.settings import Measure

__all__ = ["Measure"]

__getattr__ = lazy_names(__name__, {"Measure": "dflash_lightning.bench.settings"})
