"""A product of two experts: the drafter's marginals and a small model of the text (DeLS-Spec, arXiv 2607.07409)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.errors import SettingError
from dflash_lightning.head.base import DraftHead, HeadOutput
from dflash_lightning.head.memory import TokenMemory, initialise, num_columns
from dflash_lightning.ops.lm_head import LanguageHead, View
from dflash_lightning.types import BlockLayout, Scores

Expert = Literal["gru", "markov"]


class ExpertsHead(DraftHead):
    """``q_k = softmax(U_k + alpha l_k - beta log prior)``, where ``U_k`` are the target's logits of slot ``k``.

    ``l_k`` are those of the local expert, a model of the next token that sees neither target features nor the drafter:

    - ``gru``: ``W_2 silu(W_1 s)``, where ``s`` is the state of a gated recurrent unit over the target's embeddings of
      the root and of the tokens drafted behind it;
    - ``markov``: ``W_2 E[token before]``.

    The prior is divided out because both experts contain it: how often each token is a label of the training rows, plus
    one. With ``alpha`` and ``beta`` 0 this is DFlash, bit for bit; neither has a part in training.

    The views are ``local``, ``softmax(l_k)``, which trains the expert; ``base``, ``softmax(U_k)``, for a drafter that
    is trained beside it (the two share no weight); and ``main``, the product, which nothing trains.

    From MH 5.2 (third-party code, notes). RECONSTRUCTED: where the prior comes from, and the weights at the start.
    """

    name: ClassVar[str] = "experts"
    initial: ClassVar[frozenset[str]] = frozenset({"init_std"})
    distributions = ("main", "base", "local")
    log_prior: Tensor

    def __init__(
        self,
        *,
        expert: Expert = "gru",  # what the local expert knows: all tokens of the block (gru), or the last one (markov)
        state_size: int = 1024,  # numbers by which gru knows the tokens before a slot
        rank: int = 256,  # of the expert's last layer
        alpha: float | int = 0.3,  # weight of the expert's logits
        beta: float | int = 0.3,  # weight of the logarithm of the prior, which is taken away
        init_std: float = 0.02,  # of the weights at the start
    ) -> None:
        super().__init__()
        if expert not in get_args(Expert):
            raise SettingError("head.expert", f"{expert!r} is unknown", f"Use one of {list(get_args(Expert))}")
        for name, size in (("state_size", state_size), ("rank", rank)):
            if size < 1:
                raise SettingError(f"head.{name}", f"{size} knows nothing of a token", "Use 1 or more")
        for name, weight in (("alpha", alpha), ("beta", beta)):
            if weight < 0:
                raise SettingError(f"head.{name}", f"{weight} would turn an expert round", "Use 0 or more (DeLS: 0.3)")
        self.expert: Expert = expert
        self.state_size = state_size
        self.rank = rank
        self.alpha = float(alpha)
        self.beta = float(beta)
        self.init_std = init_std
        self.keeps_state = expert == "gru"

    def build(self, config: DraftConfig) -> None:
        tokens, columns = num_columns(config)
        if self.expert == "gru":
            self.memory = TokenMemory(config.hidden_size, self.state_size)
            self.narrow = nn.Linear(self.state_size, self.rank, bias=False)
        else:
            self.previous = nn.Embedding(tokens, self.rank)
        self.following = nn.Linear(self.rank, columns, bias=False)
        self.register_buffer("log_prior", torch.zeros(tokens))  # nothing is known yet: it takes nothing away
        initialise(self, self.init_std)

    def count_labels(self, counts: Callable[[], Mapping[int, int]]) -> None:
        found = counts()
        seen = torch.ones(len(self.log_prior), dtype=torch.float64)
        seen[list(found)] += torch.tensor(list(found.values()), dtype=torch.float64)
        self.log_prior.copy_((seen / seen.sum()).log())

    def outputs(self, hidden: Float[Tensor, "B N K H"], layout: BlockLayout, lm: LanguageHead) -> HeadOutput:
        rows, base = layout.rows, View.of(hidden, layout.rows, lm)
        prior, following = self._prior(lm), self.following.weight
        if self.expert == "gru":
            states = self.memory.along(lm.embed(layout.prev_ids), layout.predicts)
            feature = self._of_state(states.flatten(0, 2).index_select(0, rows))
        else:
            feature = self.previous(layout.prev_ids.flatten().index_select(0, rows))

        def product(hidden: Tensor, feature: Tensor, following: Tensor) -> Tensor:
            return self._product(lm.logits(hidden), nn.functional.linear(feature, following), prior)

        shape, shared = base.shape, (following,)
        return HeadOutput(
            {
                "main": View((base.per_row[0], feature), rows, shape, lm, shared=shared, compose=product),
                "base": base,
                "local": View((feature,), rows, shape, lm, shared=shared, compose=nn.functional.linear),
            }
        )

    def open(self, hidden: Float[Tensor, "B D H"], roots: Int[Tensor, " B"], lm: LanguageHead) -> Scores:
        base, prior = lm.logits(hidden), self._prior(lm)

        def step(state: Any, tokens: Int[Tensor, "B W"], depth: int) -> tuple[Scores, Any]:
            if self.expert == "gru":
                state = self.memory.step(state, lm.embed(tokens))
                feature = self._of_state(state)
            else:
                feature = self.previous(tokens)
            local = self.following(feature)
            return Scores(self._product(base[:, depth, None].expand_as(local), local, prior), lm.ids), state

        state = hidden.new_zeros(len(roots), 1, self.state_size) if self.expert == "gru" else None
        return Scores(base, lm.ids, state=state, step=step)

    def _of_state(self, state: Float[Tensor, "*lanes S"]) -> Float[Tensor, "*lanes r"]:
        return nn.functional.silu(self.narrow(state))

    def _prior(self, lm: LanguageHead) -> Float[Tensor, " v"]:
        """Logarithms of the prior, one per column of ``lm``; over a reduced vocabulary they need not sum to 1."""
        return self.log_prior if lm.ids is None else self.log_prior[lm.ids]

    def _product(
        self, base: Float[Tensor, "*slots v"], local: Float[Tensor, "*slots v"], prior: Float[Tensor, " v"]
    ) -> Float[Tensor, "*slots v"]:
        return base + self.alpha * local - self.beta * prior
