"""The drafter as one model: its configuration's checks, its files, foreign checkpoints, and how training starts it.

Importing this package registers the drafter with transformers' Auto classes.
"""

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.model.config import make_draft_config
from dflash_lightning.model.model import DraftModel, load_draft, save_draft

__all__ = ["DraftConfig", "DraftModel", "load_draft", "make_draft_config", "save_draft"]
