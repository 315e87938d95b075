"""The proposer that runs a trained drafter: one step takes in target features and drafts a block, in static shapes."""

from __future__ import annotations

import copy
import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from dflash_lightning.decoding.compiled import CANNOT_COMPILE, GraphCounter, warn_uncompiled
from dflash_lightning.decoding.head import DecodingHead
from dflash_lightning.decoding.proposer import Proposer
from dflash_lightning.decoding.types import Round, Verdict
from dflash_lightning.device import wait
from dflash_lightning.errors import SettingError
from dflash_lightning.model import DraftModel
from dflash_lightning.ops.row_product import RowProduct, can_multiply
from dflash_lightning.ops.shallow_copy import copy_tree
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import FeatureSpec, Scores, TargetFeatures

PROMPT_ROWS = 64
# What compiling costs, and what it saves at most: a graph cannot be quicker than nothing. Measured: 11 s with a warm
# cache of Inductor's and 37 s with a cold one, for about half of a draft step of 10 ms.
_COMPILE_SECONDS = 20.0
_SAVED_SHARE = 0.5
_TOKENS_PER_ROUND = 2.0  # before anything is decoded


class DraftProposer(Proposer):
    """Drafts with a decode-only copy of ``draft``: the trained model is read by ``refresh`` and never touched.

    The context is everything committed before the root. Prompts are taken in by chunks of ``PROMPT_ROWS``; a round
    takes in what the target computed in the round before and drafts, in one step. Both are functions of static shape,
    compiled once; the language head runs outside of them, since its rows may be prepacked. Rows beyond those of
    ``start`` are padding up to ``batch_size``. ``block_size`` feeds the drafter fewer slots than it was trained with,
    or more where ``untrained_slots`` lets it.
    """

    def __init__(
        self,
        target: FrozenTarget,
        draft: DraftModel,
        *,
        batch_size: int,
        max_length: int,
        head: DecodingHead,
        compile: bool,
        block_size: int | None = None,
        untrained_slots: bool = False,
        prepacked: bool = True,
        shown: bool = True,
    ) -> None:
        self.shown = shown
        self.target = target
        self.source = draft
        self.batch_size = batch_size
        self.lm = head
        self.block_size = draft.config.block_size if block_size is None else block_size
        self.num_drafts = num_drafts(draft, block_size, untrained_slots=untrained_slots)
        self.signals, self.signals_in_turn = draft.head.signals, draft.head.signals_in_turn
        self.keeps_state = draft.keeps_state
        self.graphs = GraphCounter()
        self.compiled = compile
        self.weights = decode_copy(draft, target)
        self.weights.bind(target)
        self.products: dict[nn.Linear, RowProduct] = {}
        self.model = self._with_row_products() if prepacked else self.weights
        chunk_rows = max(PROMPT_ROWS, self.num_drafts + 1)  # whatever is written past the cursor at once
        self.cache = self.model.make_cache(batch_size=batch_size, max_length=max_length, chunk_rows=chunk_rows)
        self._make_buffers()
        self._skipped: list[tuple[TargetFeatures, Tensor]] = []  # rounds without drafts that are not taken in yet
        self._absorb: Callable[..., None] | None = None
        self._step: Callable[..., Any] | None = None

    def required(self) -> FeatureSpec:
        return self.source.required()

    def _make_buffers(self) -> None:
        """What the steps read, at fixed addresses: slot embeddings, feature rows and how many of them count."""
        config, device = self.model.config, self.target.device
        dtype = self.model.dtype
        masks = torch.full((self.batch_size, self.block_size), config.mask_token_id, device=device)
        self.slots = self.target.embed(masks).to(dtype).clone()
        self.prompt_rows, self.round_rows = (
            TargetFeatures.empty(
                self.required(),
                (self.batch_size, rows),
                config.target_hidden_size,
                dtype=dtype,
                tokens=self.required().tokens,
                kv=(self.target.facts.num_kv_heads, self.target.facts.head_dim),
                device=device,
            ).map(torch.zero_)
            for rows in (PROMPT_ROWS, self.num_drafts + 1)
        )
        self.keep = torch.zeros(self.batch_size, dtype=torch.long, device=device)
        self.rejected = self.keep.clone() if self.model.conditioning.carries else None
        shape = (self.batch_size, self.num_drafts + 1, config.hidden_size)
        self.recalled = torch.zeros(shape, dtype=dtype, device=device) if self.model.conditioning.recalls else None

    def _with_row_products(self) -> DraftModel:
        """A copy that shares the weights and multiplies by ``RowProduct`` where that can be done."""

        def replace(module: nn.Module) -> nn.Module | None:
            if type(module) is nn.Linear and can_multiply(module.weight):
                self.products[module] = RowProduct(module.weight, module.bias)
            return self.products.get(module)  # type: ignore[call-overload,no-any-return]

        copied: DraftModel = copy_tree(self.weights, replace)
        return copied

    def refresh(self) -> None:
        """Copy the drafter as it is now: its weights, and what it keeps beside them (statistics, temperatures)."""
        theirs = self.source.state_dict()
        for name, mine in self.weights.state_dict().items():
            mine.copy_(theirs[name])
        for linear, product in self.products.items():
            product.refresh(linear.weight)

    def warm_up(self) -> None:
        """Make the graphs, if they are not there: seconds that belong to no measurement."""
        if self._step is not None:
            return
        self.keep.zero_()
        try:
            if self.compiled and self.shown:
                print("compiling the draft step ...", file=sys.stderr, flush=True)
            self._make_steps()
        except CANNOT_COMPILE as error:
            warn_uncompiled(error)
            self.compiled = False
            self._make_steps()

    def compile_if_it_pays(self, new_tokens: int) -> None:
        """Compile the steps if drafting ``new_tokens`` one after another without would cost more time than that."""
        if self._seconds_of_a_step() * _SAVED_SHARE * new_tokens / _TOKENS_PER_ROUND > _COMPILE_SECONDS:
            self.compiled, self._step = True, None
            self.warm_up()

    def _seconds_of_a_step(self) -> float:
        """The quickest of three draft steps, which change nothing: no row of their features counts."""
        assert self._step is not None, "warm_up comes before measuring"
        self.keep.zero_()
        spent = []
        for _ in range(3):
            begin = time.perf_counter()
            self._step(self.slots, self.round_rows, self.keep)
            wait(self.target.device)
            spent.append(time.perf_counter() - begin)
        return min(spent)

    def _make_steps(self) -> None:
        """Two functions of buffers; everything else they read is static too, weights and caches included."""
        model, cache, lm, first_slot = self.model, self.cache, self.lm, self.model.alignment.first_slot
        rejected, recalled = self.rejected, self.recalled

        def absorb(rows: TargetFeatures, keep: Tensor) -> None:
            model.extend_cache(rows, keep, cache, lm)

        def step(slots: Tensor, rows: TargetFeatures, keep: Tensor) -> Tensor:
            return model.draft_hidden(slots, rows, keep, cache, lm, rejected, recalled)[:, first_slot:]

        self._absorb = self.graphs.compile(absorb) if self.compiled else absorb
        self._step = self.graphs.compile(step) if self.compiled else step
        self._absorb(self.prompt_rows, self.keep)
        self._step(self.slots, self.round_rows, self.keep)

    def start(self, features: TargetFeatures, lengths: Int[Tensor, " B"], roots: Int[Tensor, " B"]) -> None:
        self.cache.cursor.zero_()
        self._skipped.clear()
        self._take_in(features.with_next(lengths, roots), lengths)

    def _take_in(self, features: TargetFeatures, lengths: Int[Tensor, " B"]) -> None:
        """Rows of the context without drafting behind them; nothing is left for the next step to take in."""
        assert self._absorb is not None, "warm_up comes before decoding"
        for begin in range(0, features.hidden.shape[1], PROMPT_ROWS):
            chunk = features.rows(begin, begin + PROMPT_ROWS)
            self._load(self.prompt_rows, chunk, (lengths - begin).clamp(0, PROMPT_ROWS))
            self._absorb(self.prompt_rows, self.keep)
        self.keep.zero_()
        self._carry(None)

    def skip(self, features: TargetFeatures, keep: Int[Tensor, " B"]) -> None:
        if not self._skipped:
            self._take_in(self.round_rows, self.keep.clone())
        self._skipped.append((features.rows(0, 1), keep))
        if len(self._skipped) == PROMPT_ROWS:
            self._take_in_skipped()

    def _take_in_skipped(self) -> None:
        if self._skipped:
            rows, kept = zip(*self._skipped, strict=True)
            self._skipped.clear()
            self._take_in(TargetFeatures.joined(rows), torch.stack(kept).sum(0))

    def propose(self, roots: Int[Tensor, " B"], where: Round) -> Scores:
        assert self._step is not None, "warm_up comes before decoding"
        self._take_in_skipped()
        self.slots[: len(roots), 0].copy_(self.target.embed(roots))
        hidden = self._step(self.slots, self.round_rows, self.keep)[: len(roots)]
        if self.recalled is not None:
            self.recalled[: len(roots), :-1].copy_(hidden)  # nothing is drafted after the last draft
        return self.model.open(hidden, roots, self.lm)

    def ingest(self, features: TargetFeatures, keep: Int[Tensor, " B"], verdict: Verdict) -> None:
        self._load(self.round_rows, features, keep)
        self._carry(verdict.rejected)

    def _carry(self, rejected: Int[Tensor, " b"] | None) -> None:
        """How many rows behind the kept ones the next block may read; none of the rounds before."""
        if self.rejected is not None:
            self.rejected.zero_()
            if rejected is not None:
                self.rejected[: len(rejected)].copy_(rejected)

    def _load(self, rows: TargetFeatures, features: TargetFeatures, keep: Int[Tensor, " b"]) -> None:
        """Put features where the next step reads them. What stands behind ``keep``, or in padding rows, is harmless."""
        batch, count = features.hidden.shape[:2]
        rows.map(lambda x: x[:batch, :count]).copy_(features)
        self.keep.zero_()
        self.keep[: len(keep)].copy_(keep)


def num_drafts(draft: DraftModel, block_size: int | None, *, untrained_slots: bool = False) -> int:
    """Tokens drafted per round where the drafter is fed ``block_size`` slots, the root's included; null: all it has.

    Raises:
        ValueError: it was trained with fewer slots, and ``untrained_slots`` is false; or the head has no weights for
            so many.
    """
    own = draft.alignment
    if block_size is None:
        return own.num_drafts
    if block_size < 2 or (block_size > own.block_size and not untrained_slots):
        raise SettingError(
            "decoding.block_size",
            f"{block_size} slots, but the drafter was trained with {own.block_size}",
            allowed=f"Use a number from 2 to {own.block_size}, or null for all of them",
            do="To see what more are worth all the same, set decoding.untrained_slots=true",
        )
    found, most = dataclasses.replace(own, block_size=block_size).num_drafts, draft.head.most_drafts
    if most is not None and found > most:
        raise SettingError(
            "decoding.block_size",
            f"{block_size} slots, but the drafter's head has weights for {most} drafts",
            allowed=f"Use a number from 2 to {own.block_size}, or null for all of them",
        )
    return found


def decode_copy(draft: DraftModel, target: FrozenTarget) -> DraftModel:
    """``draft`` in the target's dtype and on its device, without gradients; buffers of token ids stay whole numbers."""
    model = copy.deepcopy(draft).eval().requires_grad_(False)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(target.device, target.dtype if tensor.is_floating_point() else tensor.dtype)
    return model
