"""How a drafter begins: at random, from layers of its target, or from another drafter."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash_lightning.block import BlockConstructor
from dflash_lightning.conditioning import Conditioning
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.drafter import Drafter
from dflash_lightning.head import DraftHead
from dflash_lightning.model import DraftModel, make_draft_config
from dflash_lightning.model.config import identify
from dflash_lightning.model.found import find_draft_config, find_weights
from dflash_lightning.target import FrozenTarget, check_layer_ids, check_mask_token_id, choose_mask_token_id
from dflash_lightning.target.mask_token import UsedIds, check_mask_row
from dflash_lightning.types import TargetFacts

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

    def make(self, target: FrozenTarget, used_ids: UsedIds) -> DraftModel:
        """The drafter for ``target``; ``used_ids`` are the token ids of the training rows (with counts, for messages).

        Raises:
            ValueError: a setting does not fit the target or the data; says which.
        """
        if self.init_from is not None:
            own = replace(self, conditioning=copy.copy(self.conditioning))  # _continue fills in what is left open
            return own._continue(target, used_ids)
        if self.draft_vocabulary == "data" and not used_ids:
            raise ValueError("draft_vocabulary: 'data' needs a DraftData data module to take the ids from. Use null.")
        mask_token_id = self.block.mask_token_id
        if mask_token_id is None:
            mask_token_id = choose_mask_token_id(target, used_ids)
        check_mask_token_id(mask_token_id, target, used_ids)
        vocabulary = sorted(used_ids) if self.draft_vocabulary == "data" else None
        config = self._config(target.facts, mask_token_id, None if vocabulary is None else len(vocabulary))
        # The initial weights depend on the seed alone, not on what drew random numbers before.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = DraftModel(config)
            if vocabulary is not None:
                model.draft_vocab.copy_(torch.tensor(vocabulary))
            model.warm_start(target.decoder_layer_state)
        return model

    def checks(
        self, facts: TargetFacts, layer_state: Callable[[int], Mapping[str, Tensor]]
    ) -> Iterator[Callable[[], object]]:
        """What can be checked before the target's weights are there: a call raises ``ValueError`` if it does not fit.

        ``facts`` need no digest; ``layer_state`` gives names and shapes of a decoder layer's weights (meta device). A
        drafter that training starts from decides what the recipe leaves open, so it is read first.
        """
        if self.init_from is not None:
            yield lambda: self._check_start(facts)
            return
        ids = self.conditioning.target_layer_ids
        if ids is None:
            yield lambda: self.conditioning.default_layer_ids(facts.num_layers)
        else:
            yield lambda: check_layer_ids(ids, facts)
        yield lambda: self.drafter.geometry(facts)
        mask = self.block.mask_token_id
        if mask is not None:
            yield lambda: check_mask_row(mask, facts)
        yield lambda: self._try_start(facts, layer_state)

    def _check_start(self, facts: TargetFacts) -> None:
        assert self.init_from is not None
        theirs = find_draft_config(self.init_from, setting="init_from")
        if theirs is None:
            return  # on the hub: read with its weights
        plan = replace(self, conditioning=copy.copy(self.conditioning))  # what is left open is filled in
        plan._fill_in(theirs)
        plan._agree(theirs, facts)

    def _try_start(self, facts: TargetFacts, layer_state: Callable[[int], Mapping[str, Tensor]]) -> None:
        """Build the drafter without storage and start it from the target's layers: names and shapes must fit."""
        with torch.device("meta"):
            model = DraftModel(self._config(facts, self.block.mask_token_id or 0, None))
        model.warm_start(layer_state)

    def _config(self, facts: TargetFacts, mask_token_id: int, draft_vocab_size: int | None) -> DraftConfig:
        return make_draft_config(
            facts,
            block=self.block,
            conditioning=self.conditioning,
            drafter=self.drafter,
            head=self.head,
            mask_token_id=mask_token_id,
            draft_vocab_size=draft_vocab_size,
        )

    def _continue(self, target: FrozenTarget, used_ids: UsedIds) -> DraftModel:
        """The drafter at ``init_from``: it decides what the recipe leaves open (null), and must agree with the rest.

        What it says of its target is replaced by what this target is; its own settings stay as they are.
        """
        assert self.init_from is not None
        model = find_weights(self.init_from, setting="init_from").model.train()
        theirs = model.config
        target.check_draft(theirs)
        check_mask_token_id(theirs.mask_token_id, target, used_ids)
        self._fill_in(theirs)
        self._agree(theirs, target.facts)
        _say_what_is_outside(model, used_ids)
        theirs.num_target_layers, theirs.vocab_size = target.facts.num_layers, target.facts.vocab_size
        theirs.target, theirs.max_position_embeddings = identify(target.facts), target.facts.max_positions
        return model

    def _fill_in(self, theirs: DraftConfig) -> None:
        """Take layer ids that the recipe leaves open from the drafter that training starts from."""
        if self.conditioning.target_layer_ids is None:
            self.conditioning.target_layer_ids = list(theirs.target_layer_ids)

    def _agree(self, theirs: DraftConfig, facts: TargetFacts) -> None:
        """Refuse a drafter that is not the one the recipe describes; both values are named."""
        explicit = self.block.mask_token_id
        reduced = theirs.draft_vocab_size if self.draft_vocabulary == "data" else None
        ours = self._config(facts, theirs.mask_token_id if explicit is None else explicit, reduced)
        drafter = self.drafter.settings()
        if drafter.get("init_from_target"):
            raise ValueError(
                f"init_from: the drafter starts from {self.init_from}, but drafter.init_from_target=true starts it "
                "from the target's layers. Set drafter.init_from_target=false, or init_from=null."
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
                f"init_from: the drafter in {self.init_from} is not the one the recipe describes "
                f"({'; '.join(differing)}). Set these in the recipe to what the drafter has (or to null, where that is "
                "allowed), or train from scratch. A drafter of a part of the vocabulary is continued with "
                "draft_vocabulary=data, and keeps the tokens that it has."
            )


def _say_what_is_outside(model: DraftModel, used_ids: UsedIds) -> None:
    """A drafter keeps the tokens it was made with: those of other training rows may not be among them."""
    if model.config.draft_vocab_size is None:
        return
    kept = set(model.draft_vocab.tolist())
    if outside := len(set(used_ids) - kept):
        warnings.warn(
            f"init_from: the drafter keeps its own {len(kept)} tokens; {outside} of the {len(used_ids)} that occur in "
            "data.train are not among them: it can never propose those, and learns nothing where they are the label. "
            "Train from scratch for a vocabulary of these rows.",
            stacklevel=2,
        )
