"""Slots whose hidden state is corrected by the token before them (DFly, arXiv 2607.25852)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.head.base import DraftHead, HeadOutput
from dflash_lightning.ops.lm_head import LanguageHead, View
from dflash_lightning.ops.norm import RMSNorm
from dflash_lightning.types import BlockLayout, Scores

CONFIDENCE = "confidence"


class CorrectedHead(DraftHead):
    """``q_k = softmax(lm(h_k + W_d (silu(W_g u_k) * W_u u_k)))`` with ``u_k = [RMSNorm(h_k); RMSNorm(e_k)]``.

    ``h_k`` is the slot's hidden state and ``e_k`` the target's own embedding of the token before the slot: the data's
    in training, in decoding the one that was drafted, or the root. A slot remembers one token and no more. ``W_g`` and
    ``W_u`` are ``2H x H``. ``W_d`` is ``H x H`` and starts at 0, so that the untrained head drafts as the marginals do,
    bit for bit. From MT 2.2 (AngelSpec's code).

    With ``confidence`` it offers the signal of that name, ``[B, N, K]``: ``sigmoid(w h_k + b)``, its guess of the
    chance that a draft of the slot is accepted, given that those before it are. It reads the hidden state before the
    correction, so it knows no drafted token, and its gradient stays out of the drafter. RECONSTRUCTED: the policy of
    the paper reads a confidence, of which the code that was read trains none.
    """

    name: ClassVar[str] = "corrected"
    initial: ClassVar[frozenset[str]] = frozenset({"init_std"})

    def __init__(
        self,
        *,
        confidence: bool = False,  # offer the signal, which loss=confidence trains
        init_std: float = 0.02,  # of W_g and W_u
    ) -> None:
        super().__init__()
        self.confidence = confidence
        self.init_std = init_std
        self.signals = (CONFIDENCE,) if confidence else ()

    def build(self, config: DraftConfig) -> None:
        width, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_norm, self.token_norm = RMSNorm(width, eps=eps), RMSNorm(width, eps=eps)
        self.gate, self.up = (nn.Linear(2 * width, width, bias=False) for _ in range(2))
        self.down = nn.Linear(width, width, bias=False)
        for linear in (self.gate, self.up):
            nn.init.normal_(linear.weight, std=self.init_std)
        nn.init.zeros_(self.down.weight)
        if self.confidence:
            self.certainty = nn.Linear(width, 1)
            nn.init.zeros_(self.certainty.weight)
            nn.init.zeros_(self.certainty.bias)

    def outputs(self, hidden: Float[Tensor, "B N K H"], layout: BlockLayout, lm: LanguageHead) -> HeadOutput:
        rows, shape = layout.rows, tuple(hidden.shape[:3])
        picked = hidden.flatten(0, 2).index_select(0, rows)
        corrected = self._corrected(picked, layout.prev_ids.flatten()[rows], lm)
        return HeadOutput({"main": View((corrected,), rows, shape, lm)}, self._signals(hidden))

    def open(self, hidden: Float[Tensor, "B D H"], roots: Int[Tensor, " B"], lm: LanguageHead) -> Scores:
        def step(state: Any, tokens: Int[Tensor, "B W"], depth: int) -> tuple[Scores, Any]:
            slot = hidden[:, depth, None].expand(*tokens.shape, hidden.shape[-1])
            return Scores(lm.logits(self._corrected(slot, tokens, lm)), lm.ids), state

        return Scores(lm.logits(hidden), lm.ids, self._signals(hidden), step=step)

    def _corrected(
        self, hidden: Float[Tensor, "*rows H"], tokens: Int[Tensor, "*rows"], lm: LanguageHead
    ) -> Float[Tensor, "*rows H"]:
        """The hidden states given the token before each."""
        known = self.token_norm(lm.embed(tokens).to(hidden))
        read = torch.cat([self.hidden_norm(hidden), known], dim=-1)
        return hidden + self.down(F.silu(self.gate(read)) * self.up(read))

    def _signals(self, hidden: Float[Tensor, "*lanes H"]) -> dict[str, Tensor]:
        """In fp32: in half precision all that is nearly certain would be certain."""
        if not self.confidence:
            return {}
        return {CONFIDENCE: self.certainty(hidden.detach())[..., 0].float().sigmoid()}
