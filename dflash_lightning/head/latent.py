"""A block whose tokens share a category that is never seen (DBLast, arXiv 2608.05448)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.errors import SettingError
from dflash_lightning.head.base import DraftHead, HeadOutput
from dflash_lightning.ops.lm_head import LabelLogProb, LanguageHead, View, chunk_bytes
from dflash_lightning.types import BlockLayout, Scores


class LatentHead(DraftHead):
    """``q(x_1 .. x_D) = sum_z pi(z) prod_k softmax(lm(h_k + U_z D h_k))[x_k]``: a mixture of ``categories`` blocks.

    ``D`` has ``rank`` rows and ``U_z`` as many columns. ``pi = softmax(W h_1)`` is read from the first slot that
    predicts, which is the anchor's own where every slot predicts. Given a category the tokens are independent; without
    it each token tells something of the category, and so of the tokens after it.

    The law of a slot, in training and in decoding, is the *predictive* one: the mixture with the categories weighed by
    how well they explain the tokens before the slot. That is the law which verification must be told. To draw a
    category first and to be judged by its law alone would be lossless, too, and accept less than independent slots do;
    to declare the mixture's law of each slot by itself would not be lossless (MD V7).

    With one category it is a marginal head with a small correction. ``D`` and ``W`` start at 0: then all categories
    draft as the marginals do, and ``U_z``, which starts at random, lets them part. RECONSTRUCTED from abstract and
    notes (MT 3.6): the form of the mixture, what the prior reads, and both sizes. In training every
    category makes products with the vocabulary of its own, once for the tokens before a slot and once for the slot.
    """

    name: ClassVar[str] = "latent"
    initial: ClassVar[frozenset[str]] = frozenset({"init_std"})
    keeps_state = True

    def __init__(
        self,
        *,
        categories: int = 4,  # of which a block has one
        rank: int = 4,  # numbers by which a category changes a slot
        init_std: float = 0.02,  # of U_z
    ) -> None:
        super().__init__()
        for name, value in (("categories", categories), ("rank", rank)):
            if value < 1:
                raise SettingError(f"head.{name}", f"{value} leaves no mixture", "Use 1 or more (4 here)")
        self.categories = categories
        self.rank = rank
        self.init_std = init_std

    def build(self, config: DraftConfig) -> None:
        width = config.hidden_size
        self.prior = nn.Linear(width, self.categories)
        self.down = nn.Linear(width, self.rank, bias=False)
        self.up = nn.Linear(self.rank, self.categories * width, bias=False)
        for weight in (self.prior.weight, self.prior.bias, self.down.weight):
            nn.init.zeros_(weight)
        nn.init.normal_(self.up.weight, std=self.init_std)

    def outputs(self, hidden: Float[Tensor, "B N K H"], layout: BlockLayout, lm: LanguageHead) -> HeadOutput:
        rows, shape, count = layout.rows, tuple(hidden.shape[:3]), self.categories
        picked = hidden.flatten(0, 2).index_select(0, rows)
        weights = self._weights(hidden, picked, layout, lm).flatten(0, 2).index_select(0, rows)

        def compose(hidden: Tensor, weights: Tensor, down: Tensor, up: Tensor) -> Tensor:
            return mixed(weights, _laws(lm, _states(hidden, F.linear(F.linear(hidden, down), up), count)))

        view = View(
            (picked, weights),
            rows,
            shape,
            lm,
            shared=(self.down.weight, self.up.weight),
            compose=compose,
            chunk_rows=max(1, chunk_bytes(hidden.device) // (4 * len(lm.weight) * count)),
        )
        return HeadOutput({"main": view})

    def open(self, hidden: Float[Tensor, "B D H"], roots: Int[Tensor, " B"], lm: LanguageHead) -> Scores:
        laws = _laws(lm, _states(hidden, self.up(self.down(hidden)), self.categories))
        return mixture(_wide(self.prior(hidden[:, 0])).log_softmax(-1), laws, lm)

    def _weights(
        self,
        hidden: Float[Tensor, "B N K H"],
        picked: Float[Tensor, "R H"],
        layout: BlockLayout,
        lm: LanguageHead,
    ) -> Float[Tensor, "B N K Z"]:
        """Log-probability of every category before each slot, the tokens before it being the data's own.

        A token that nobody labelled, or that a reduced vocabulary lacks, tells nothing.
        """
        count, (batch, blocks, slots) = self.categories, hidden.shape[:3]
        states = _states(picked, self.up(self.down(picked)), count)
        each = (layout.rows[:, None] * count + torch.arange(count, device=hidden.device)).flatten()
        view = View((states.flatten(0, 1),), each, (batch, blocks, slots * count), lm)
        (said,) = view.ask(LabelLogProb(layout.labels.repeat_interleave(count, dim=-1)))
        before = F.pad(said.unflatten(-1, (slots, count)).cumsum(2)[:, :, :-1], (0, 0, 1, 0))
        first = layout.predicts.long().argmax(-1)[..., None, None].expand(-1, -1, 1, hidden.shape[-1])
        prior = _wide(self.prior(hidden.gather(2, first))).log_softmax(-1)
        return (prior + before).log_softmax(-1)


def mixture(log_prior: Float[Tensor, "B Z"], laws: Float[Tensor, "B D Z c"], lm: LanguageHead) -> Scores:
    """Scores of a block that is of category ``z`` with probability ``exp(log_prior)`` and then has ``laws[:, :, z]``.

    ``laws`` are log-probabilities over the rows of ``lm``. The state is the log-probability of every category given the
    tokens so far ``[B, W, Z]``; the first look are the laws of slots whose predecessors are not known.
    """

    def step(state: Any, tokens: Int[Tensor, "B W"], depth: int) -> tuple[Scores, Any]:
        if depth:
            columns, known = (found.view(tokens.shape) for found in lm.columns(tokens.flatten()))
            said = laws[:, depth - 1].gather(2, columns[:, None].expand(-1, laws.shape[2], -1)).transpose(1, 2)
            state = (state + torch.where(known[..., None], said, 0.0)).log_softmax(-1)
        return Scores(mixed(state, laws[:, depth, None]), lm.ids), state

    return Scores(mixed(log_prior[:, None], laws), lm.ids, state=log_prior[:, None], step=step)


def mixed(weights: Float[Tensor, "*rows Z"], laws: Float[Tensor, "*laws Z c"]) -> Float[Tensor, "*out c"]:
    """Log-probabilities of a mixture, from those of its parts and of what they say."""
    return (weights[..., None] + laws).logsumexp(-2)


def _states(
    hidden: Float[Tensor, "*rows H"], change: Float[Tensor, "*rows ZH"], count: int
) -> Float[Tensor, "*rows Z H"]:
    """The hidden states of a slot in every category."""
    return hidden[..., None, :] + change.unflatten(-1, (count, -1))


def _laws(lm: LanguageHead, states: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows c"]:
    return _wide(lm.logits(states)).log_softmax(-1)


def _wide(values: Tensor) -> Tensor:
    """In fp32 or wider: logarithms of half precision are too coarse to be added up."""
    return values.to(torch.promote_types(torch.float32, values.dtype))
