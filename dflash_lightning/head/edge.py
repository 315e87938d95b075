"""The marginals of every slot, with the likeliest tokens rated by the token before them (TAPS, arXiv 2606.00487)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.errors import SettingError
from dflash_lightning.head.base import DraftHead, HeadOutput
from dflash_lightning.ops.lm_head import LanguageHead, View
from dflash_lightning.types import BlockLayout, Scores


class EdgeHead(DraftHead):
    """``softmax(U_k + r(parent, child, depth))``, where ``r`` rates the ``candidates`` likeliest tokens of a slot.

    ``U_k`` are the target's logits of the slot. ``r = w SiLU(W [e_parent; f_child; g_depth; log q(child); H(q)])``
    with ``q = softmax(U_k)`` and its entropy ``H``; ``e`` and ``f`` have ``rank`` numbers per token. The law is an
    estimate of the target's after the parent: a tree that goes by it ranks nodes by how likely they are to be reached
    and accepted. ``w`` starts at 0, so that the untrained head drafts as the marginals do.

    The view ``main`` is this law, ``base`` is ``q``, which trains the drafter. With ``detach`` the first trains the
    scorer alone: then some loss term must read the second.

    What is scored is from notes on the paper; the network's form and sizes are RECONSTRUCTED. The paper trains on
    logged outcomes of the verifier; here the token before a slot is the training text's own (teacher forcing), as on
    the paths that a verifier accepts.
    """

    name: ClassVar[str] = "edge"
    initial: ClassVar[frozenset[str]] = frozenset({"init_std"})
    distributions = ("main", "base")

    def __init__(
        self,
        *,
        candidates: int = 8,  # likeliest tokens of a slot that are rated
        rank: int = 32,  # numbers by which a token is known, as parent and as child
        width: int = 64,  # of the hidden layer
        detach: bool = False,  # keep the gradient of the view main from the drafter
        init_std: float = 0.02,  # of the weights that start at random
    ) -> None:
        super().__init__()
        for key, value in (("candidates", candidates), ("rank", rank), ("width", width)):
            if value < 1:
                raise SettingError(f"head.{key}", f"{value} rates nothing", "Use 1 or more")
        self.candidates = candidates
        self.rank = rank
        self.width = width
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
        self.parent = nn.Embedding(config.vocab_size, self.rank)
        self.child = nn.Embedding(config.vocab_size, self.rank)
        self.depth = nn.Embedding(config.block_size, self.rank)
        self.hidden = nn.Linear(3 * self.rank + 2, self.width)
        self.rating = nn.Linear(self.width, 1, bias=False)
        for name, weight in self.named_parameters():
            if name.endswith("weight"):
                nn.init.normal_(weight, std=self.init_std)
        nn.init.zeros_(self.hidden.bias)
        nn.init.zeros_(self.rating.weight)

    def outputs(self, hidden: Float[Tensor, "B N K H"], layout: BlockLayout, lm: LanguageHead) -> HeadOutput:
        rows, shape = layout.rows, tuple(hidden.shape[:3])
        depths = (layout.predicts.cumsum(-1) - 1).clamp_min(0)
        context = torch.cat([self.parent(layout.prev_ids), self.depth(depths)], dim=-1)
        states = hidden.detach() if self.detach else hidden
        per_row = tuple(x.flatten(0, 2).index_select(0, rows) for x in (states, context))
        shared = (self.child.weight, self.hidden.weight, self.hidden.bias, self.rating.weight)

        def compose(states: Tensor, context: Tensor, child: Tensor, inner: Tensor, bias: Tensor, out: Tensor) -> Tensor:
            def rate(x: Tensor) -> Tensor:
                return nn.functional.linear(nn.functional.silu(nn.functional.linear(x, inner, bias)), out)

            return self._rated(lm.logits(states), context, lm, child, rate)

        main = View(per_row, rows, shape, lm, shared=shared, compose=compose)
        return HeadOutput({"main": main, "base": View.of(hidden, rows, lm)})

    def open(self, hidden: Float[Tensor, "B D H"], roots: Int[Tensor, " B"], lm: LanguageHead) -> Scores:
        base = lm.logits(hidden)

        def rate(x: Tensor) -> Tensor:  # by the modules, which decoding may have replaced
            return self.rating(nn.functional.silu(self.hidden(x)))  # type: ignore[no-any-return]

        def step(state: Any, tokens: Int[Tensor, "B W"], depth: int) -> tuple[Scores, Any]:
            slot = self.depth.weight[min(depth, len(self.depth.weight) - 1)].expand(*tokens.shape, self.rank)
            context = torch.cat([self.parent(tokens), slot], dim=-1)
            logits = base[:, depth, None].expand(*tokens.shape, base.shape[-1])
            return Scores(self._rated(logits, context, lm, self.child.weight, rate), lm.ids), state

        return Scores(base, lm.ids, step=step)

    def _rated(
        self,
        logits: Float[Tensor, "*rows V"],
        context: Float[Tensor, "*rows c"],
        lm: LanguageHead,
        child: Float[Tensor, "tokens r"],
        rate: Callable[[Tensor], Tensor],
    ) -> Float[Tensor, "*rows V"]:
        """The logits with a rating added at the candidates; ``context`` is known of the parent and of the depth."""
        values, places = logits.topk(self.candidates)
        log_probs = logits.float().log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1, keepdim=True)
        tokens = places if lm.ids is None else lm.ids[places]
        known = [
            context[..., None, :].expand(*values.shape, context.shape[-1]),
            nn.functional.embedding(tokens, child),
            log_probs.gather(-1, places)[..., None].to(context.dtype),
            entropy[..., None].expand(*values.shape, 1).to(context.dtype),
        ]
        rated = rate(torch.cat(known, dim=-1))[..., 0]
        return logits.scatter_add(-1, places, rated.to(logits.dtype))
