"""The frozen target: loading, features, embeddings, language head, and the cache with rollback that decoding needs."""

from dflash_lightning.target.adapter import TargetAdapter
from dflash_lightning.target.facts import check_layer_ids, sample_rows
from dflash_lightning.target.frozen import FrozenTarget
from dflash_lightning.target.load import load_target, load_text
from dflash_lightning.target.mask_token import check_mask_token_id, choose_mask_token_id
from dflash_lightning.target.text import TargetText

__all__ = [
    "FrozenTarget",
    "TargetAdapter",
    "TargetText",
    "check_layer_ids",
    "check_mask_token_id",
    "choose_mask_token_id",
    "load_target",
    "load_text",
    "sample_rows",
]
