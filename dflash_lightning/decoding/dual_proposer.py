"""Two drafters for one target: the first drafts, the second drafts anew behind places where the first may be wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from dflash_lightning.decoding.draft_proposer import DraftProposer
from dflash_lightning.decoding.proposer import Proposer
from dflash_lightning.decoding.types import Round, Verdict
from dflash_lightning.errors import SettingError
from dflash_lightning.model import DraftModel
from dflash_lightning.model.found import find_draft_config, find_weights
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import Alignment, FeatureSpec, Scores, TargetFeatures

_SECOND = "decoding.builder.second"


def check_pair(path: str, first: Alignment, block_size: int | None) -> None:
    """What tells before any weight is read that a second drafter cannot go with a first one of these blocks.

    ``block_size`` is how many slots both are fed, null: all they have. One on the hub is read with its weights.

    Raises:
        ValueError: there is none, or it drafts another number of tokens.
    """
    theirs = find_draft_config(path, setting=_SECOND)
    if theirs is not None:
        fed = [one if block_size is None else replace(one, block_size=block_size) for one in (first, theirs.alignment)]
        check_lengths(*(alignment.num_drafts for alignment in fed))


def check_lengths(first: int, second: int) -> None:
    """Refuse two drafters that do not draft equally many tokens per round.

    Raises:
        ValueError: they do not.
    """
    if first != second:
        raise SettingError(
            _SECOND,
            f"it drafts {second} tokens per round, the first drafter {first}",
            do="Use two of one length, or a decoding.block_size that both can be fed",
        )


def find_second(path: str, target: FrozenTarget) -> DraftModel:
    """The second drafter, which must be made for the target that is decoded.

    Raises:
        ValueError: none is found, it is of another target, or it drafts token by token.
    """
    draft = find_weights(path, setting=_SECOND).model
    try:
        target.check_draft(draft.config)
    except SettingError as error:
        raise SettingError(_SECOND, f"{path}: {error.what}", error.allowed, error.do) from None
    if draft.sequential:
        raise SettingError(
            _SECOND, f"{path} drafts token by token, and a block at once is asked for", do="Name another drafter"
        )
    draft.to(target.device)  # type: ignore[arg-type]
    return draft


class LaneProposer(DraftProposer):
    """The second drafter: ``lanes`` blocks per row over one context, each beginning with drafts that it is told."""

    def __init__(self, *args: Any, lanes: int, **kwargs: Any) -> None:
        self.lanes = lanes
        super().__init__(*args, **kwargs)

    def _make_buffers(self) -> None:
        super()._make_buffers()
        self.slots = self.slots[:, None].repeat(1, self.lanes, 1, 1)

    def _make_steps(self) -> None:
        model, cache, lm, first_slot = self.model, self.cache, self.lm, self.model.alignment.first_slot

        def absorb(rows: TargetFeatures, keep: Tensor) -> None:
            model.extend_cache(rows, keep, cache, lm)

        def step(slots: Tensor, rows: TargetFeatures, keep: Tensor) -> Tensor:
            return model.draft_blocks(slots, rows, keep, cache, lm)[:, :, first_slot:]

        self._absorb = self.graphs.compile(absorb) if self.compiled else absorb
        self._step = self.graphs.compile(step) if self.compiled else step
        self._absorb(self.prompt_rows, self.keep)
        self._step(self.slots, self.round_rows, self.keep)

    def redraft(self, roots: Int[Tensor, " B"], tokens: Int[Tensor, "B W D"], known: Int[Tensor, "B W"]) -> Scores:
        """See ``Scores.redraft``. Once per round: the rows that the last round left are taken in here."""
        assert self._step is not None, "warm_up comes before decoding"
        self._take_in_skipped()
        count, slots = len(roots), torch.arange(self.block_size, device=roots.device)
        chain = torch.cat([roots[:, None, None].expand(-1, self.lanes, 1), tokens], dim=2)[..., : self.block_size]
        ids = torch.where(slots <= known[..., None], chain, self.model.config.mask_token_id)
        self.slots[:count].copy_(self.target.embed(ids))
        hidden = self._step(self.slots, self.round_rows, self.keep)[:count]
        return self.model.open(hidden.flatten(0, 1), roots.repeat_interleave(self.lanes), self.lm)


class DualProposer(Proposer):
    """Drafts with ``first``; its scores let the builder ask ``second``. Both take in what the target computes.

    Raises:
        ValueError: the two do not draft equally many tokens.
    """

    def __init__(self, first: DraftProposer, second: LaneProposer) -> None:
        check_lengths(first.num_drafts, second.num_drafts)
        self.first, self.second = first, second
        self.num_drafts = first.num_drafts
        self.signals, self.signals_in_turn = first.signals, first.signals_in_turn
        self.keeps_state = first.keeps_state

    @property
    def compiled(self) -> bool:  # type: ignore[override]
        """Whether both draft steps are compiled."""
        return self.first.compiled and self.second.compiled

    def required(self) -> FeatureSpec:
        return self.first.required() | self.second.required()

    def start(self, features: TargetFeatures, lengths: Int[Tensor, " B"], roots: Int[Tensor, " B"]) -> None:
        self.first.start(features, lengths, roots)
        self.second.start(features, lengths, roots)

    def propose(self, roots: Int[Tensor, " B"], where: Round) -> Scores:
        return replace(self.first.propose(roots, where), redraft=partial(self.second.redraft, roots))

    def ingest(self, features: TargetFeatures, keep: Int[Tensor, " B"], verdict: Verdict) -> None:
        self.first.ingest(features, keep, verdict)
        self.second.ingest(features, keep, verdict)

    def skip(self, features: TargetFeatures, keep: Int[Tensor, " B"]) -> None:
        self.first.skip(features, keep)
        self.second.skip(features, keep)


def members(proposer: Proposer) -> tuple[DraftProposer, ...]:
    """The drafters that a proposer runs."""
    if isinstance(proposer, DualProposer):
        return proposer.first, proposer.second
    return (proposer,) if isinstance(proposer, DraftProposer) else ()
