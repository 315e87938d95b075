"""The frozen target: loading, features, embeddings, language head, and the cache with rollback that decoding needs.

Names load on first use (``lazy.py``): a command that needs one of them should not pay for all.
"""

from typing import TYPE_CHECKING

from dflash_lightning.lazy import lazy_names

if TYPE_CHECKING:
    from dflash_lightning.target.adapter import TargetAdapter
    from dflash_lightning.target.branches import ReadText, branch_features, check_branches
    from dflash_lightning.target.facts import check_layer_ids, sample_rows
    from dflash_lightning.target.frozen import FrozenTarget
    from dflash_lightning.target.load import load_target, load_text
    from dflash_lightning.target.mask_token import check_mask_token_id, choose_mask_token_id
    from dflash_lightning.target.text import TargetText

_HOME = {
    "FrozenTarget": "dflash_lightning.target.frozen",
    "ReadText": "dflash_lightning.target.branches",
    "TargetAdapter": "dflash_lightning.target.adapter",
    "TargetText": "dflash_lightning.target.text",
    "branch_features": "dflash_lightning.target.branches",
    "check_branches": "dflash_lightning.target.branches",
    "check_layer_ids": "dflash_lightning.target.facts",
    "check_mask_token_id": "dflash_lightning.target.mask_token",
    "choose_mask_token_id": "dflash_lightning.target.mask_token",
    "load_target": "dflash_lightning.target.load",
    "load_text": "dflash_lightning.target.load",
    "sample_rows": "dflash_lightning.target.facts",
}

__all__ = [
    "FrozenTarget",
    "ReadText",
    "TargetAdapter",
    "TargetText",
    "branch_features",
    "check_branches",
    "check_layer_ids",
    "check_mask_token_id",
    "choose_mask_token_id",
    "load_target",
    "load_text",
    "sample_rows",
]

__getattr__ = lazy_names(__name__, _HOME)
