"""A walk through the candidates of a block, scored pair by pair (LiLiCorr, arXiv 2608.20530)."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.errors import SettingError
from dflash_lightning.head.base import DraftHead, HeadOutput
from dflash_lightning.head.lattice_network import LatticeNetwork, LatticeSizes, true_rows
from dflash_lightning.ops.candidates import Candidates, place_of, spread_law, token_ids
from dflash_lightning.ops.context import ContextState
from dflash_lightning.ops.likeliest import likeliest, to_slots
from dflash_lightning.ops.lm_head import LanguageHead, View
from dflash_lightning.types import BlockLayout, LabelLayout, Scores


class LatticeHead(DraftHead):
    """Of each slot's ``candidates`` likeliest tokens, one after the other given the one before.

    A small network looks at all candidates of a block at once (``lattice_network``) and scores the first slot's, and
    every pair of neighbours. The law of slot 0 is the softmax of ``start``, that of slot ``s + 1`` after candidate
    ``i`` the softmax of ``pair[s, i]``, both over the candidates alone: a chain of first order, walked from left to
    right. A temperature divides the scores. The base logits act through the network only. In training the token before
    is the data's own; where that is no candidate of its slot, the likeliest one stands in, as in decoding for a token
    that no builder of ours would draft.

    Views: ``base`` is the language head on every slot, ``main`` this head's own law over the vocabulary. The embedding
    that is read is the target's and gets no gradient.

    From MH 1.1, 1.2 and 1.4 (training code and serving code). ``prefix_stable`` is false: slot 0's scores see the
    candidates of the last slot. With fewer slots than in training the first rows of its tables are used, which is
    another law than the trained one (lossless, as any).
    """

    name: ClassVar[str] = "lattice"
    distributions = ("main", "base")
    label_layouts: ClassVar[tuple[LabelLayout, ...]] = ("same_position",)
    initial: ClassVar[frozenset[str]] = frozenset({"init_std"})
    prefix_stable: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({"boundary"})
    chooses: ClassVar[bool] = True

    def __init__(
        self,
        *,
        candidates: int = 8,  # tokens of each slot among which is chosen
        hidden_size: int | None = 1024,  # of the network that scores them; null: the drafter's width
        num_layers: int = 2,  # layers of that network
        num_heads: int = 8,  # attention heads of a layer
        mlp_ratio: float | int = 2.0,  # inner width of a layer's MLP, as a multiple of hidden_size
        factor_dim: int = 1024,  # numbers in the vectors whose cosine is a score
        vector_eps: float = 1e-4,  # the least length that a vector is divided by
        logit_scale: float | int = 8.0,  # the score of two equal vectors
        init_std: float = 0.02,  # of weights that start at random
    ) -> None:
        super().__init__()
        self.candidates = candidates
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.mlp_ratio = mlp_ratio
        self.factor_dim = factor_dim
        self.vector_eps = vector_eps
        self.logit_scale = logit_scale
        self.init_std = init_std
        for name in ("candidates", "num_layers", "num_heads", "mlp_ratio", "factor_dim", "vector_eps", "logit_scale"):
            if not getattr(self, name) > 0:
                raise SettingError(f"head.{name}", f"{getattr(self, name)} is not positive", "Use a number above 0")
        if hidden_size is not None and (hidden_size < 1 or hidden_size % num_heads):
            raise _no_heads(hidden_size, num_heads)

    def build(self, config: DraftConfig) -> None:
        columns = config.draft_vocab_size or config.vocab_size
        if columns is not None and columns < self.candidates:
            raise SettingError(
                "head.candidates", f"{self.candidates} of {columns} tokens that the drafter knows", "Use fewer"
            )
        hidden = config.hidden_size if self.hidden_size is None else self.hidden_size
        if hidden % self.num_heads:
            raise _no_heads(hidden, self.num_heads)
        self.most_drafts = config.alignment.num_drafts
        sizes = LatticeSizes(
            width=config.hidden_size,
            slots=self.most_drafts,
            candidates=self.candidates,
            hidden=hidden,
            layers=self.num_layers,
            heads=self.num_heads,
            mlp_ratio=self.mlp_ratio,
            factors=self.factor_dim,
            norm_eps=config.rms_norm_eps,
        )
        self.lilicorr = LatticeNetwork(sizes, vector_eps=self.vector_eps, scale=self.logit_scale)
        self.lilicorr.initialise(self.init_std)

    def beside(self, context: ContextState) -> Float[Tensor, "B N 1 H"]:
        """The context row before each block, which has no feature of the anchor itself."""
        return context.boundary()[:, :, None]

    def outputs(self, hidden: Float[Tensor, "B N r H"], layout: BlockLayout, lm: LanguageHead) -> HeadOutput:
        slots, boundary = hidden[:, :, :-1], hidden[:, :, -1]
        # All that predict, labelled or not: a slot's law depends on the candidates of all others.
        rows = layout.predicting
        if rows is None:
            rows = layout.predicts.flatten().nonzero().squeeze(1)
        base = View.of(slots, rows, lm)
        found = likeliest(base, layout.labels, self.candidates)
        drafts = slots.shape[2] - 1
        blocks = rows.view(-1, drafts)[:, 0] // slots.shape[2]
        ids, log_probs = (tensor.view(-1, drafts, self.candidates) for tensor in (found.ids, found.log_probs))
        states = base.per_row[0].view(len(ids), drafts, -1)
        start, pair = self._scores(ids, log_probs, states, boundary.flatten(0, 1)[blocks], lm)
        labels = layout.labels.flatten()[rows].view(-1, drafts)
        scores = true_rows(start, pair, place_of(labels, ids)[0]).flatten(0, 1)
        main = View((scores, found.columns), rows, base.shape, lm, compose=partial(spread_law, size=len(lm.weight)))
        candidates = Candidates(to_slots(found.ids, base, -1), to_slots(scores, base, 0.0))
        return HeadOutput({"main": main, "base": base}, candidates=candidates)

    def open(self, hidden: Float[Tensor, "B r H"], roots: Int[Tensor, " B"], lm: LanguageHead) -> Scores:
        slots, boundary = hidden[:, :-1], hidden[:, -1]
        logits = lm.logits(slots)
        logits = logits.to(torch.promote_types(torch.float32, logits.dtype))
        top, columns = logits.topk(self.candidates)
        ids, log_probs = token_ids(lm, columns), top - logits.logsumexp(-1, keepdim=True)
        start, pair = self._scores(ids, log_probs, slots, boundary, lm)

        def step(state: Any, tokens: Int[Tensor, "B W"], depth: int) -> tuple[Scores, Any]:
            shape = (*tokens.shape, self.candidates)
            if depth == 0:
                scores = start[:, None].expand(shape)
            else:
                place, _ = place_of(tokens, ids[:, depth - 1, None].expand(shape))
                scores = pair[:, depth - 1].gather(1, place[..., None].expand(shape))
            return Scores(scores, ids[:, depth, None].expand(shape)), state

        return Scores(log_probs, ids, step=step)

    def _scores(
        self,
        ids: Int[Tensor, "M D k"],
        log_probs: Float[Tensor, "M D k"],
        hidden: Float[Tensor, "M D H"],
        boundary: Float[Tensor, "M H"],
        lm: LanguageHead,
    ) -> tuple[Float[Tensor, "M k"], Float[Tensor, "M d k k"]]:
        # A token that is a candidate in many places is looked up and projected once.
        tokens, where = ids.unique(return_inverse=True)
        known = self.lilicorr.project_tokens(lm.embed(tokens))[where]
        return self.lilicorr(known, hidden, log_probs, boundary)


def _no_heads(hidden: int, heads: int) -> SettingError:
    return SettingError(
        "head.num_heads", f"{heads} heads cannot share {hidden} features evenly", "Use a divisor of head.hidden_size"
    )
