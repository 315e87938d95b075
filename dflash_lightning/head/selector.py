"""A choice among the likeliest tokens of each slot that knows the token before (DFlash 2, z-lab)."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.errors import SettingError
from dflash_lightning.head.base import DraftHead, HeadOutput
from dflash_lightning.ops.candidates import Candidates, logits_at, spread_law, token_ids
from dflash_lightning.ops.likeliest import likeliest, to_slots
from dflash_lightning.ops.lm_head import LanguageHead, View
from dflash_lightning.types import BlockLayout, LabelLayout, Scores


class SelectorHead(DraftHead):
    """``q_k(b | a) = softmax(U_k[b] + <A[a] * W h_k, B[b]>)`` over the ``candidates`` likeliest tokens of the slot.

    ``U_k`` are the target's logits of slot ``k``, scaled and capped; ``a`` is the token before (the data's own in
    training, the drafted one or the root in decoding). ``A`` has a row of ``rank`` numbers for every token, ``B`` one
    for every token that the drafter knows. Tokens that are no candidates have probability 0, exactly.

    Views: ``base`` is the language head on every slot, ``main`` the law above over the vocabulary. ``detach`` keeps the
    gradient of ``main`` and of the candidates from the drafter: only ``A``, ``B`` and ``W`` learn from them.

    From MT 3.4 and MH 2.1: the released model's code. How it was trained is not published; ``B`` starts at 0, so that
    the untrained head drafts as the marginals do, and ``A`` and ``W`` at random, as most code that trains it has it.
    """

    name: ClassVar[str] = "selector"
    distributions = ("main", "base")
    label_layouts: ClassVar[tuple[LabelLayout, ...]] = ("same_position",)
    initial: ClassVar[frozenset[str]] = frozenset({"init_std", "detach"})
    chooses: ClassVar[bool] = True

    def __init__(
        self,
        *,
        candidates: int = 16,  # tokens of each slot among which is chosen
        rank: int = 256,  # numbers by which a token is known to its neighbour
        detach: bool = False,  # keep the gradient of the choice from the drafter
        init_std: float = 0.02,  # of the weights that start at random
    ) -> None:
        super().__init__()
        for name, value in (("candidates", candidates), ("rank", rank)):
            if value < 1:
                raise SettingError(f"head.{name}", f"{value} is not positive", "Use 1 or more (DFlash 2: 16 and 256)")
        self.candidates = candidates
        self.rank = rank
        self.detach = detach
        self.init_std = init_std

    def build(self, config: DraftConfig) -> None:
        if config.vocab_size is None:
            raise ValueError("vocab_size: the drafter's config states none, but its head has a row for every token.")
        columns = config.draft_vocab_size or config.vocab_size
        if columns < self.candidates:
            raise SettingError(
                "head.candidates", f"{self.candidates} of {columns} tokens that the drafter knows", "Use fewer"
            )
        self.candidate_selector = Selector(config.vocab_size, columns, config.hidden_size, self.rank)
        self.candidate_selector.initialise(self.init_std)

    def outputs(self, hidden: Float[Tensor, "B N K H"], layout: BlockLayout, lm: LanguageHead) -> HeadOutput:
        base = View.of(hidden, layout.rows, lm)
        found = likeliest(base, layout.labels, self.candidates)
        states, logits = base.per_row[0], found.logits
        if self.detach:
            states, logits = states.detach(), logits.detach()
        labels, before = (ids.flatten().index_select(0, layout.rows) for ids in (layout.labels, layout.prev_ids))
        known = self.candidate_selector.known(before, states)
        scores = logits + self.candidate_selector.bonus(known, found.columns)
        own = lm.columns(labels)[0][:, None]
        of_label = logits_at(lm, states, own) + self.candidate_selector.bonus(known, own)
        compose = partial(spread_law, size=len(lm.weight))
        main = View((scores, found.columns), layout.rows, base.shape, lm, compose=compose)
        candidates = Candidates(
            to_slots(found.ids, base, -1), to_slots(scores, base, 0.0), to_slots(of_label[:, 0], base, 0.0)
        )
        return HeadOutput({"main": main, "base": base}, candidates=candidates)

    def open(self, hidden: Float[Tensor, "B D H"], roots: Int[Tensor, " B"], lm: LanguageHead) -> Scores:
        base, columns = lm.logits(hidden).topk(self.candidates)
        ids = token_ids(lm, columns)

        def step(state: Any, tokens: Int[Tensor, "B W"], depth: int) -> tuple[Scores, Any]:
            shape = (*tokens.shape, self.candidates)
            known = self.candidate_selector.known(tokens, hidden[:, depth, None])
            bonus = self.candidate_selector.bonus(known, columns[:, depth, None].expand(shape))
            return Scores(base[:, depth, None] + bonus, ids[:, depth, None].expand(shape)), state

        return Scores(base, ids, step=step)


class Selector(nn.Module):
    """The codebooks, under the names of the released checkpoints."""

    def __init__(self, tokens: int, columns: int, width: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(tokens, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(columns, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    @torch.no_grad()
    def initialise(self, std: float) -> None:
        """Successors at 0, where the choice is that of the base logits."""
        nn.init.normal_(self.predecessor_codebook, std=std)
        nn.init.normal_(self.hidden_projection.weight, std=std)
        self.successor_codebook.zero_()

    def known(self, before: Int[Tensor, "*rows"], hidden: Float[Tensor, "*#rows H"]) -> Float[Tensor, "*rows r"]:
        """What the token before and the slot's hidden state say together."""
        return nn.functional.embedding(before, self.predecessor_codebook) * self.hidden_projection(hidden)

    def bonus(self, known: Float[Tensor, "*rows r"], columns: Int[Tensor, "*rows k"]) -> Float[Tensor, "*rows k"]:
        """What is added to the logits of ``columns``."""
        successors = nn.functional.embedding(columns, self.successor_codebook)
        return (successors * known[..., None, :]).sum(-1).to(known.dtype)
