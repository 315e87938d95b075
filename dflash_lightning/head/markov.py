"""A bias on every slot's logits that depends on the token before it, and a confidence (DSpark, arXiv 2607.05147)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.errors import SettingError
from dflash_lightning.head.base import DraftHead, HeadOutput
from dflash_lightning.ops.lm_head import LanguageHead, View
from dflash_lightning.types import BlockLayout, Scores

Variant = Literal["plain", "gated", "recurrent"]
CONFIDENCE = "confidence"


class MarkovHead(DraftHead):
    """``q_k = softmax(U_k + W_2 f_k)``: the target's logits ``U_k`` of slot ``k`` and a bias of low rank.

    ``e_k = W_1[token before k]`` has ``rank`` numbers. The feature ``f_k`` is

    - ``plain``: ``e_k``;
    - ``gated``: ``sigmoid(G [h_k; e_k]) * e_k``, where ``h_k`` is the slot's hidden state;
    - ``recurrent``: ``tanh(o)`` with ``(g, c, o) = J [s_{k-1}; e_k; h_k] + bias`` and the state
      ``s_k = sigmoid(g) s_{k-1} + (1 - sigmoid(g)) tanh(c)``, which is 0 before the first draft of a block.

    In training the token before is the data's own; in decoding the one that was drafted, or the root. So drafts are
    drawn in turn (``Scores.step``), each from a law that knows those before it.

    With ``confidence`` it offers the signal of that name, ``[B, N, K]``: ``sigmoid(w [h_k; e_k])``, the head's own
    guess of the chance that a draft of the slot is accepted, given that those before it are. It knows the token before
    the slot, never the slot's own, so a policy may cut drafts by it under rejection. ``detach_confidence`` trains ``w``
    alone with it, as other published heads do; DSpark trains the drafter, too. Other programs' heads add a number to
    what ``sigmoid`` takes (``confidence_bias``), and some read ``h_k`` alone (``confidence_token`` false).

    From MT 3.2 (paper and released code). What W_1, W_2 and w are at the start is not published as far as we know:
    here W_2 starts at 0, so that the untrained head drafts as the marginals do.
    """

    name: ClassVar[str] = "markov"
    initial: ClassVar[frozenset[str]] = frozenset({"init_std"})
    signals_in_turn: ClassVar[bool] = True

    def __init__(
        self,
        *,
        rank: int = 256,  # numbers by which a token is known to its successor
        variant: Variant = "plain",  # plain, gated (by the slot's hidden state) or recurrent (over the block)
        confidence: bool = False,  # offer the signal, which loss=confidence trains
        detach_confidence: bool = False,  # keep the confidence's gradient from the drafter and from W_1
        confidence_token: bool = True,  # the confidence reads the token before the slot too
        confidence_bias: bool = False,  # the confidence has an additive number, as speculators' and SpecForge's have
        init_std: float = 0.02,  # of the weights that start at random
    ) -> None:
        super().__init__()
        if rank < 1:
            raise SettingError("head.rank", f"{rank} knows nothing of a token", "Use 1 or more (DSpark uses 256)")
        if variant not in get_args(Variant):
            raise SettingError("head.variant", f"{variant!r} is unknown", f"Use one of {list(get_args(Variant))}")
        self.rank = rank
        self.variant: Variant = variant
        self.confidence = confidence
        self.detach_confidence = detach_confidence
        self.confidence_token = confidence_token
        self.confidence_bias = confidence_bias
        self.init_std = init_std
        self.signals = (CONFIDENCE,) if confidence else ()
        self.keeps_state = variant == "recurrent"

    def build(self, config: DraftConfig) -> None:
        if config.vocab_size is None:
            raise ValueError("vocab_size: the drafter's config states none, but its head has a row for every token.")
        width, rank = config.hidden_size, self.rank
        self.previous = nn.Embedding(config.vocab_size, rank)
        self.following = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.confidence:
            read = width + rank if self.confidence_token else width
            self.certainty = nn.Linear(read, 1, bias=self.confidence_bias)
            if self.confidence_bias:
                nn.init.zeros_(self.certainty.bias)
        if self.variant == "gated":
            self.gate = nn.Linear(width + rank, rank, bias=False)
        if self.variant == "recurrent":
            self.recurrence = nn.Linear(2 * rank + width, 3 * rank)
            nn.init.zeros_(self.recurrence.bias)
        for name, weight in self.named_parameters():
            if name.endswith("weight"):
                nn.init.normal_(weight, std=self.init_std)
        nn.init.zeros_(self.following.weight)

    def outputs(self, hidden: Float[Tensor, "B N K H"], layout: BlockLayout, lm: LanguageHead) -> HeadOutput:
        known = self.previous(layout.prev_ids)
        feature = self._features(hidden, known, layout)
        rows, shape = layout.rows, tuple(hidden.shape[:3])

        def compose(hidden: Tensor, feature: Tensor, following: Tensor) -> Tensor:
            return lm.logits(hidden) + nn.functional.linear(feature, following)

        per_row = tuple(x.flatten(0, 2).index_select(0, rows) for x in (hidden, feature))
        view = View(per_row, rows, shape, lm, shared=(self.following.weight,), compose=compose)
        return HeadOutput({"main": view}, self._signals(hidden, known))

    def open(self, hidden: Float[Tensor, "B D H"], roots: Int[Tensor, " B"], lm: LanguageHead) -> Scores:
        base = lm.logits(hidden)

        def step(state: Any, tokens: Int[Tensor, "B W"], depth: int) -> tuple[Scores, Any]:
            known = self.previous(tokens)
            slot = hidden[:, depth, None].expand(*tokens.shape, hidden.shape[-1])
            feature, state = self._feature(slot, known, state)
            logits = base[:, depth, None] + self.following(feature)
            return Scores(logits, lm.ids, self._signals(slot, known)), state

        state = hidden.new_zeros(len(roots), 1, self.rank) if self.variant == "recurrent" else None
        return Scores(base, lm.ids, state=state, step=step)

    def _features(
        self, hidden: Float[Tensor, "B N K H"], known: Float[Tensor, "B N K r"], layout: BlockLayout
    ) -> Float[Tensor, "B N K r"]:
        """The features of all slots, the tokens before them being the data's own."""
        if self.variant != "recurrent":
            return self._feature(hidden, known, None)[0]
        state, found = torch.zeros_like(known[:, :, 0]), []
        for slot in range(hidden.shape[2]):
            feature, after = self._feature(hidden[:, :, slot], known[:, :, slot], state)
            state = torch.where(layout.predicts[:, :, slot, None], after, state)  # other slots are no step of decoding
            found.append(feature)
        return torch.stack(found, dim=2)

    def _feature(
        self, hidden: Float[Tensor, "*lanes H"], known: Float[Tensor, "*lanes r"], state: Any
    ) -> tuple[Float[Tensor, "*lanes r"], Any]:
        """The feature of a slot, and the state behind it."""
        if self.variant == "plain":
            return known, None
        if self.variant == "gated":
            return self.gate(torch.cat([hidden, known], dim=-1)).sigmoid() * known, None
        keep, change, out = self.recurrence(torch.cat([state, known, hidden], dim=-1)).chunk(3, dim=-1)
        keep = keep.sigmoid()
        return out.tanh(), keep * state + (1.0 - keep) * change.tanh()

    def _signals(self, hidden: Float[Tensor, "*lanes H"], known: Float[Tensor, "*lanes r"]) -> dict[str, Tensor]:
        """The chance of acceptance, in fp32: in half precision all that is nearly certain would be certain."""
        if not self.confidence:
            return {}
        read = torch.cat([hidden, known], dim=-1) if self.confidence_token else hidden
        logit = self.certainty(read.detach() if self.detach_confidence else read)[..., 0]
        return {CONFIDENCE: logit.float().sigmoid()}
