"""How a drafter begins: at random, from layers of its target, or from another drafter."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_lightning.block import Anchored, BlockConstructor
from dflash_lightning.conditioning import Conditioning
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.drafter import Drafter
from dflash_lightning.errors import SettingError
from dflash_lightning.files import DraftOrigin
from dflash_lightning.head import DraftHead
from dflash_lightning.model import DraftModel, make_draft_config
from dflash_lightning.model.config import check_config, check_parts
from dflash_lightning.model.found import find_draft_config, find_weights
from dflash_lightning.model.origin import Origin
from dflash_lightning.progress import say
from dflash_lightning.target import FrozenTarget, check_layer_ids, check_mask_token_id, choose_mask_token_id
from dflash_lightning.target.mask_token import UsedIds, check_mask_row
from dflash_lightning.types import Alignment, FeatureSpec, TargetFacts


@dataclass(frozen=True)
class DraftPlan:
    """A drafter as a recipe describes it, before there is a target to build it for (fields: see ``DraftModule``)."""

    block: BlockConstructor
    conditioning: Conditioning
    drafter: Drafter
    head: DraftHead
    draft_vocabulary: str | None = None
    init_from: str | Mapping[str, Any] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.draft_vocabulary not in (None, "data"):
            raise SettingError(
                "draft_vocabulary",
                f"{self.draft_vocabulary!r} is unknown",
                "Use 'data' (ids of the training rows) or null (all)",
            )
        self._origin()

    def _origin(self) -> Origin | None:
        stated = DraftOrigin.read(self.init_from)
        parts = {"conditioning": self.conditioning, "drafter": self.drafter, "head": self.head}
        return None if stated is None else Origin(stated, parts)

    def check_parts(self) -> None:
        """Refuse parts that do not go together, whatever the target is.

        Raises:
            ValueError: the drafter reads what the conditioning does not offer, or is fed otherwise in decoding than
                by these blocks; the head does not suit the drafter, or cannot learn the labels of these blocks; rounds
                are to be played with blocks that cannot be moved; a setting of drafter or head means nothing in blocks
                of this size; or ``init_from.change`` names no setting.
        """
        check_parts(self.block, self.conditioning, self.drafter, self.head)
        self.drafter.check_slots(self.block.largest_size)
        self.head.check_drafts(Alignment(self.block.block_size, 0, self.block.label_layout).num_drafts)
        if self.block.label_layout not in self.head.label_layouts:
            raise SettingError(
                "block.label_layout",
                f"head {self.head.name!r} cannot be trained with {self.block.label_layout!r} blocks",
                f"Use one of {list(self.head.label_layouts)}, or another head",
            )
        if self.conditioning.carries and not (type(self.block) is Anchored and self.block.inputs == "masks"):
            raise SettingError(
                "block",
                f"conditioning {self.conditioning.name!r} moves blocks to where a round of decoding has ended, which "
                f"is not known of {self.block.name!r} blocks of {self.block.inputs}",
                "Use block=anchored with inputs=masks, or another conditioning",
            )
        origin = self._origin()
        if origin is not None:
            origin.check_names()

    def make(self, target: FrozenTarget, used_ids: UsedIds) -> DraftModel:
        """The drafter for ``target``; ``used_ids`` are the token ids of the training rows (with counts, for messages).

        Raises:
            ValueError: a setting does not fit the target or the data; says which.
        """
        self.check_parts()
        origin = self._origin()
        theirs = None
        if origin is not None:
            theirs = find_weights(origin.stated.path, setting="init_from").model
            check_target(theirs.config, target, may_differ="target" in origin.stated.change)
        vocabulary = self._vocabulary(theirs, used_ids)
        mask_token_id = self._mask_token_id(theirs)
        if mask_token_id is None:
            mask_token_id = choose_mask_token_id(target, used_ids)
        check_mask_token_id(mask_token_id, target, used_ids)
        size = None if vocabulary is None else len(vocabulary)
        config = self._config(target.facts, mask_token_id, size, None if theirs is None else theirs.config)
        if not target.has_layers:  # without a digest, rows tell the target from another one
            config.target = {**config.target, "rows": target.sampled_rows()}
        if theirs is not None:
            _say_what_is_outside(vocabulary, used_ids)
            config.chat_template_kwargs = dict(theirs.config.chat_template_kwargs)
        # The initial weights depend on the seed alone, not on what drew random numbers before.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = DraftModel(config)
            check_borrowed(model, target.facts)
            if vocabulary is not None:
                model.draft_vocab.copy_(torch.tensor(vocabulary))
            model.warm_start(target.decoder_layer_state)
        if origin is not None and theirs is not None:
            say(origin.copy(theirs, model))
            for part in origin.stated.parts if origin.stated.freeze else ():
                model.get_submodule(part).requires_grad_(False)
        return model

    def checks(
        self, facts: TargetFacts, layer_state: Callable[[int], Mapping[str, Tensor]]
    ) -> Iterator[Callable[[], object]]:
        """What can be checked before the target's weights are there: a call raises ``ValueError`` if it does not fit.

        ``facts`` need no digest; ``layer_state`` gives names and shapes of a decoder layer's weights (meta device). A
        drafter that training starts from decides what the recipe leaves open, so it is read first.
        """
        origin = self._origin()
        if origin is not None:
            yield lambda: self._check_start(origin.stated.path, facts)
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

    def _check_start(self, path: str, facts: TargetFacts) -> None:
        theirs = find_draft_config(path, setting="init_from")
        if theirs is None:
            return  # on the hub: read with its weights
        mask = theirs.mask_token_id if self.block.mask_token_id is None else self.block.mask_token_id
        reduced = theirs.draft_vocab_size if self.draft_vocabulary == "data" else None
        self._config(facts, mask, reduced, theirs)

    def _try_start(self, facts: TargetFacts, layer_state: Callable[[int], Mapping[str, Tensor]]) -> None:
        """Build the drafter without storage and start it from the target's layers: names and shapes must fit."""
        model = self._without_storage(facts)
        check_borrowed(model, facts)
        model.warm_start(layer_state)

    def _without_storage(self, facts: TargetFacts) -> DraftModel:
        with torch.device("meta"):
            return DraftModel(self._config(facts, self.block.mask_token_id or 0, None, None))

    def required(self, facts: TargetFacts) -> FeatureSpec | None:
        """Features that the drafter will read; null where what training starts from decides that.

        Raises:
            ValueError: a setting does not fit the target.
        """
        return None if self.init_from is not None else self._without_storage(facts).required()

    @property
    def runs_layers(self) -> bool:
        """Whether the drafter runs layers of the target itself."""
        return type(self.drafter).bind is not Drafter.bind

    def _mask_token_id(self, theirs: DraftModel | None) -> int | None:
        """What the recipe says, else what the drafter that training starts from has."""
        stated = self.block.mask_token_id
        return stated if stated is not None or theirs is None else theirs.config.mask_token_id

    def _vocabulary(self, theirs: DraftModel | None, used_ids: UsedIds) -> list[int] | None:
        """Token ids of a reduced vocabulary: those that a drafter has are kept, because its weights know them."""
        if self.draft_vocabulary is None:
            return None
        origin = self._origin()
        if theirs is not None and origin is not None and "draft_vocab_size" not in origin.stated.change:
            return None if theirs.config.draft_vocab_size is None else theirs.draft_vocab.tolist()
        if not used_ids:
            raise SettingError(
                "draft_vocabulary", "'data' needs a DraftData data module to take the ids from", "Use null"
            )
        return sorted(used_ids)

    def _config(
        self, facts: TargetFacts, mask_token_id: int, draft_vocab_size: int | None, theirs: DraftConfig | None
    ) -> DraftConfig:
        """The drafter's configuration; ``theirs`` (of ``init_from``) decides what the recipe leaves open.

        Raises:
            ValueError: something differs from ``theirs`` and may not.
        """
        origin, conditioning = self._origin(), self.conditioning
        if theirs is not None and origin is not None and "conditioning" in origin.stated.parts:
            conditioning = copy.copy(conditioning)  # what is left open is filled in
            if conditioning.target_layer_ids is None and theirs.target_layer_ids:
                conditioning.target_layer_ids = list(theirs.target_layer_ids)
        config = make_draft_config(
            facts,
            block=self.block,
            conditioning=conditioning,
            drafter=self.drafter,
            head=self.head,
            mask_token_id=mask_token_id,
            draft_vocab_size=draft_vocab_size,
        )
        if theirs is not None and origin is not None:
            origin.fill_in(config, theirs)
            origin.check(config, theirs, draft_vocabulary=self.draft_vocabulary)
            check_config(config)
        return config


def check_borrowed(model: DraftModel, facts: TargetFacts) -> None:
    """Refuse heads of another shape than the target's where the drafter reads the target's own keys and values.

    Raises:
        ValueError: names the setting of the drafter.
    """
    if not model.conditioning.borrows:
        return
    config = model.config
    sizes = {
        "num_kv_heads": (config.num_key_value_heads, facts.num_kv_heads),
        "head_dim": (config.head_dim, facts.head_dim),
    }
    for name, (own, theirs) in sizes.items():
        if own != theirs:
            raise SettingError(
                f"drafter.{name}",
                f"{own}, but conditioning {model.conditioning.name!r} reads the keys and values of {facts.name}, "
                f"which has {theirs}",
                "Use that or null, or another conditioning",
            )


def check_target(theirs: DraftConfig, target: FrozenTarget, *, may_differ: bool) -> None:
    """Refuse to start from a drafter of another target; ``may_differ`` lets another copy of it through, as to shape.

    Raises:
        ValueError: sizes or the digest of the weights differ.
    """
    target.check_draft(theirs, relative=True)
    digest, own = theirs.target.get("digest"), target.facts.digest
    if may_differ:
        return
    if digest and own and digest != own:
        raise SettingError(
            "init_from",
            f"the drafter was made for {theirs.target.get('name', 'another target')} with digest of the "
            f"weights {digest}, but the target {target.facts.name} has {own}",
            "Give the target it was made for, or list 'target' in init_from.change if this is another copy "
            "of that model (quantised or fine-tuned, say)",
        )
    target.check_draft(theirs)


def _say_what_is_outside(vocabulary: list[int] | None, used_ids: UsedIds) -> None:
    """A drafter keeps the tokens it was made with: those of other training rows may not be among them."""
    if vocabulary is not None and (outside := len(set(used_ids) - {*vocabulary})):
        warnings.warn(
            f"init_from: the drafter keeps its own {len(vocabulary)} tokens; {outside} of the {len(used_ids)} that "
            "occur in data.train are not among them: it can never propose those, and learns nothing where they are the "
            "label. Train from scratch for a vocabulary of these rows.",
            stacklevel=2,
        )
