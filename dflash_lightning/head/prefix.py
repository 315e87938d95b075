"""A correction of every slot's logits by a memory of the tokens drafted before it (Domino, arXiv 2605.29707)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.errors import SettingError
from dflash_lightning.head.base import DraftHead, HeadOutput
from dflash_lightning.head.memory import TokenMemory, initialise, num_columns
from dflash_lightning.ops.lm_head import LanguageHead, View
from dflash_lightning.types import BlockLayout, Scores


class PrefixHead(DraftHead):
    """``q_k = softmax(U_k + W_2 silu(W_1 [h_k; s_k]))``: the target's logits ``U_k`` of slot ``k``, corrected.

    ``s_k`` is the state of a gated recurrent unit over the target's embeddings of the root and of all tokens drafted
    before slot ``k`` in this block (the one right before it included). The first ``pure_slots`` predicting slots are
    not corrected: ``q_k = softmax(U_k)``. Their tokens go into the memory all the same.

    In training the tokens before are the data's own; in decoding those that were drafted. So drafts are drawn in turn
    (``Scores.step``), each from a law that knows those before it. The view ``base`` is ``softmax(U_k)`` at all slots,
    for the loss that trains the backbone first (``FadingCrossEntropy``).

    From MT 3.3 (released code). The released sampler of blocks that all predict leaves out the last slot, which is
    trained; here it drafts. What the weights are at the start is our choice: W_2 is 0, so that the untrained head
    drafts as the marginals do, all else is drawn with ``init_std``.
    """

    name: ClassVar[str] = "prefix"
    initial: ClassVar[frozenset[str]] = frozenset({"init_std"})
    keeps_state = True
    distributions = ("main", "base")

    def __init__(
        self,
        *,
        state_size: int = 1024,  # numbers by which the tokens before a slot are known
        rank: int = 256,  # of the correction
        pure_slots: int = 1,  # predicting slots at the start of a block that are not corrected
        init_std: float = 0.02,  # of the weights that start at random
    ) -> None:
        super().__init__()
        for name, value in (("state_size", state_size), ("rank", rank)):
            if value < 1:
                raise SettingError(f"head.{name}", f"{value} knows nothing of a token", "Use 1 or more")
        if pure_slots < 0:
            raise SettingError("head.pure_slots", f"{pure_slots} is no number of slots", "Use 0 or more (Domino: 1)")
        self.state_size = state_size
        self.rank = rank
        self.pure_slots = pure_slots
        self.init_std = init_std

    def check_drafts(self, num_drafts: int) -> None:
        if self.pure_slots >= num_drafts:
            raise SettingError(
                "head.pure_slots",
                f"{self.pure_slots} leaves none of {num_drafts} drafts to correct, so the head would not be trained",
                f"Use a number from 0 to {num_drafts - 1} (Domino: 1), or longer blocks (block.block_size)",
            )

    def build(self, config: DraftConfig) -> None:
        _, columns = num_columns(config)
        self.memory = TokenMemory(config.hidden_size, self.state_size)
        self.narrow = nn.Linear(config.hidden_size + self.state_size, self.rank, bias=False)
        self.following = nn.Linear(self.rank, columns, bias=False)
        initialise(self, self.init_std)
        nn.init.zeros_(self.following.weight)

    def outputs(self, hidden: Float[Tensor, "B N K H"], layout: BlockLayout, lm: LanguageHead) -> HeadOutput:
        rows = layout.rows
        base = View.of(hidden, rows, lm)
        states = self.memory.along(lm.embed(layout.prev_ids), layout.predicts).flatten(0, 2).index_select(0, rows)
        place = (layout.predicts.cumsum(-1) - 1).flatten().index_select(0, rows)
        feature = torch.where((place >= self.pure_slots)[:, None], self._feature(base.per_row[0], states), 0.0)

        def compose(hidden: Tensor, feature: Tensor, following: Tensor) -> Tensor:
            return lm.logits(hidden) + nn.functional.linear(feature, following)

        shared = (self.following.weight,)
        main = View((base.per_row[0], feature), rows, base.shape, lm, shared=shared, compose=compose)
        return HeadOutput({"main": main, "base": base})

    def open(self, hidden: Float[Tensor, "B D H"], roots: Int[Tensor, " B"], lm: LanguageHead) -> Scores:
        base = lm.logits(hidden)

        def step(state: Any, tokens: Int[Tensor, "B W"], depth: int) -> tuple[Scores, Any]:
            state = self.memory.step(state, lm.embed(tokens))
            logits = base[:, depth, None].expand(*tokens.shape, -1)
            if depth >= self.pure_slots:
                slot = hidden[:, depth, None].expand(*tokens.shape, -1)
                logits = logits + self.following(self._feature(slot, state))
            return Scores(logits, lm.ids), state

        return Scores(base, lm.ids, state=hidden.new_zeros(len(roots), 1, self.state_size), step=step)

    def _feature(
        self, hidden: Float[Tensor, "*lanes H"], state: Float[Tensor, "*lanes S"]
    ) -> Float[Tensor, "*lanes r"]:
        return nn.functional.silu(self.narrow(torch.cat([hidden, state.to(hidden.dtype)], dim=-1)))
