"""Train block-diffusion drafters for lossless speculative decoding, with PyTorch Lightning.

The names a user types load on first use, so that ``import dflash_lightning`` needs neither torch nor Lightning.
"""

from typing import TYPE_CHECKING

from dflash_lightning.lazy import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dflash_lightning.data import DraftData
    from dflash_lightning.module import DraftModule
    from dflash_lightning.recipe import build_recipe, check_recipe, load_recipe
    from dflash_lightning.target import FrozenTarget

_HOME = {
    "DraftModule": "dflash_lightning.module",
    "DraftData": "dflash_lightning.data",
    "FrozenTarget": "dflash_lightning.target",
    "load_recipe": "dflash_lightning.recipe",
    "check_recipe": "dflash_lightning.recipe",
    "build_recipe": "dflash_lightning.recipe",
}

__all__ = ["DraftData", "DraftModule", "FrozenTarget", "__version__", "build_recipe", "check_recipe", "load_recipe"]

__getattr__ = lazy_names(__name__, _HOME)
