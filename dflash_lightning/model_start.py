"""How a drafter begins: at random, from layers of its target, or from another drafter."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, replace

import torch

from dflash_lightning.block import BlockConstructor
from dflash_lightning.conditioning import Conditioning
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.drafter import Drafter
from dflash_lightning.head import DraftHead
from dflash_lightning.model import DraftModel, make_draft_config
from dflash_lightning.model_config import identify
from dflash_lightning.model_found import find_weights
from dflash_lightning.target import FrozenTarget, check_mask_token_id, choose_mask_token_id

# What a recipe says about a drafter that another drafter's weights cannot follow.
GEOMETRY = (
    *("block_size", "label_layout", "mask_token_id", "target_layer_ids", "draft_vocab_size", "num_hidden_layers"),
    *("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
    *("rope_parameters", "layer_types", "sliding_window", "is_causal"),
)
# Settings of a drafter that DraftConfig has under another name.
_FIELD_OF = {
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "num_layers": "num_hidden_layers",
}


@dataclass(frozen=True)
class DraftPlan:
    """A drafter as a recipe describes it, before there is a target to build it for (fields: see ``DraftModule``)."""

    block: BlockConstructor
    conditioning: Conditioning
    drafter: Drafter
    head: DraftHead
    draft_vocabulary: str | None = None
    init_from: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.draft_vocabulary not in (None, "data"):
            raise ValueError(
                f"draft_vocabulary: {self.draft_vocabulary!r} is unknown. "
                "Use 'data' (ids of the training rows) or null (all)."
            )

    def make(self, target: FrozenTarget, used_ids: set[int]) -> DraftModel:
        """The drafter for ``target``; ``used_ids`` are the token ids of the training rows.

        Raises:
            ValueError: a setting does not fit the target or the data; says which.
        """
        if self.init_from is not None:
            own = replace(self, conditioning=copy.copy(self.conditioning))  # _continue fills in what is left open
            return own._continue(self.init_from, target, used_ids)
        if self.draft_vocabulary == "data" and not used_ids:
            raise ValueError("draft_vocabulary: 'data' needs a DraftData data module to take the ids from. Use null.")
        mask_token_id = self.block.mask_token_id
        if mask_token_id is None:
            mask_token_id = choose_mask_token_id(target, used_ids)
        check_mask_token_id(mask_token_id, target, used_ids)
        vocabulary = sorted(used_ids) if self.draft_vocabulary == "data" else None
        config = self._config(target, mask_token_id, None if vocabulary is None else len(vocabulary))
        # The initial weights depend on the seed alone, not on what drew random numbers before.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = DraftModel(config)
            if vocabulary is not None:
                model.draft_vocab.copy_(torch.tensor(vocabulary))
            model.warm_start(target.decoder_layer_state)
        return model

    def _config(self, target: FrozenTarget, mask_token_id: int, draft_vocab_size: int | None) -> DraftConfig:
        return make_draft_config(
            target.facts,
            block=self.block,
            conditioning=self.conditioning,
            drafter=self.drafter,
            head=self.head,
            mask_token_id=mask_token_id,
            draft_vocab_size=draft_vocab_size,
        )

    def _continue(self, path: str, target: FrozenTarget, used_ids: set[int]) -> DraftModel:
        """The drafter at ``path``: it decides what the recipe leaves open (null), and must agree with what it states.

        What it says of its target is replaced by what this target is; its own settings stay as they are.
        """
        model = find_weights(path, setting="init_from").model.train()
        theirs = model.config
        target.check_draft(theirs)
        check_mask_token_id(theirs.mask_token_id, target, used_ids)
        explicit = self.block.mask_token_id
        reduced = theirs.draft_vocab_size if self.draft_vocabulary == "data" else None
        mask_token_id = theirs.mask_token_id if explicit is None else explicit
        if self.conditioning.target_layer_ids is None:
            self.conditioning.target_layer_ids = list(theirs.target_layer_ids)
        ours = self._config(target, mask_token_id, reduced)
        drafter = self.drafter.settings()
        if drafter.get("init_from_target"):
            raise ValueError(
                f"init_from: the drafter starts from {path}, but drafter.init_from_target=true starts it from the "
                "target's layers. Set drafter.init_from_target=false, or init_from=null."
            )
        open_settings = {_FIELD_OF.get(name, name) for name, value in drafter.items() if value is None}
        pairs = {name: (getattr(ours, name), getattr(theirs, name)) for name in GEOMETRY if name not in open_settings}
        for axis, part in ours.components.items():
            pairs[axis] = part["name"], theirs.components.get(axis, {}).get("name")
        differing = [f"{name} is {a!r} in the recipe, {b!r} there" for name, (a, b) in pairs.items() if a != b]
        if self.draft_vocabulary == "data" and theirs.draft_vocab_size is None:
            differing.append("draft_vocabulary is 'data' in the recipe, the whole vocabulary there")
        if differing:
            raise ValueError(
                f"init_from: the drafter in {path} is not the one the recipe describes ({'; '.join(differing)}). "
                "Set these in the recipe to what the drafter has (or to null, where that is allowed), or train from "
                "scratch. A drafter of a part of the vocabulary is continued with draft_vocabulary=data, and keeps the "
                "tokens that it has."
            )
        _say_what_is_outside(model, used_ids)
        theirs.num_target_layers, theirs.vocab_size = target.facts.num_layers, target.facts.vocab_size
        theirs.target, theirs.max_position_embeddings = identify(target.facts), target.facts.max_positions
        return model


def _say_what_is_outside(model: DraftModel, used_ids: set[int]) -> None:
    """A drafter keeps the tokens it was made with: those of other training rows may not be among them."""
    if model.config.draft_vocab_size is None:
        return
    kept = set(model.draft_vocab.tolist())
    if outside := len(used_ids - kept):
        warnings.warn(
            f"init_from: the drafter keeps its own {len(kept)} tokens; {outside} of the {len(used_ids)} that occur in "
            "data.train are not among them: it can never propose those, and learns nothing where they are the label. "
            "Train from scratch for a vocabulary of these rows.",
            stacklevel=2,
        )
