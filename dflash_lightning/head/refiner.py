"""A small causal network that turns marginals into drafts that know each other (xPress, arXiv 2608.02438)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.errors import SettingError
from dflash_lightning.head.base import DraftHead, HeadOutput
from dflash_lightning.head.memory import initialise, num_columns
from dflash_lightning.ops.lm_head import Argmax, LanguageHead, View
from dflash_lightning.types import BlockLayout, Scores


class RefinerHead(DraftHead):
    """``q_k = softmax(U_k + W_o y_k)``: the target's logits ``U_k`` of slot ``k``, refined by the tokens before it.

    ``x_k = W_in [D_h h_k; D_g mean_j h_j; E[token before k]]`` has ``rank`` numbers, ``h_j`` being the hidden states of
    the block's predicting slots. ``u_k = x_k + sum_{j <= k} L_{kj} * x_j`` mixes them per channel, with weights of
    their own for every pair of slots, and ``y_k = u_k + W_d (silu(W_g u_k) * W_u u_k)``, ``expansion`` times as wide in
    between. Slots behind those of the training (``decoding.untrained_slots``) mix nothing.

    Drafts are drawn in turn, or with ``passes`` all at once and again (Jacobi): pass 0 is drawn from the marginals, and
    every pass from the laws after the tokens of the pass before. After ``i`` passes the first ``i`` drafts are those
    that are drawn in turn; as many passes as drafts give all of them. With fewer, late drafts are drawn from laws after
    other tokens. They are declared as such, so that verification is exact, but fewer of them stand.

    Training has these views. ``main``: after the data's own tokens. ``base``: the marginals ``softmax(U_k)``.
    ``round_1 .. round_N``: after the likeliest tokens of the round before, those of ``base`` at first, as Jacobi passes
    find them. Rounds carry no gradient to each other. Where a slot is not scored, the data's token stands in for the
    round's. Every view is a pass over the vocabulary, and every round but the last one more for its likeliest tokens.

    From MT 3.5 (paper's code), over the predicting slots alone. speculators 0.9 also counts slot 0 of blocks whose
    slots stand where they predict; with blocks that all predict both are the same. L starts at 0, and so does W_o
    (``zero_readout``): the untrained head drafts as the marginals do. speculators draws W_o with ``init_std``.
    """

    name: ClassVar[str] = "refiner"
    initial: ClassVar[frozenset[str]] = frozenset({"init_std", "zero_readout", "rounds"})
    prefix_stable: ClassVar[bool] = False  # the mean is over all slots that are asked for
    keeps_state = True

    def __init__(
        self,
        *,
        rank: int = 256,  # numbers per slot that are mixed
        expansion: int = 2,  # width of the gated layer, in ranks
        passes: int | None = 6,  # Jacobi passes of decoding; null draws token by token, which costs a CPU less
        rounds: int = 3,  # views of free-running rounds that training offers
        zero_readout: bool = True,  # begin as the marginals; false: readout at random too, as speculators has it
        init_std: float = 0.02,  # of the weights that start at random
    ) -> None:
        super().__init__()
        for name, value in (("rank", rank), ("expansion", expansion)):
            if value < 1:
                raise SettingError(f"head.{name}", f"{value} refines nothing", "Use 1 or more")
        if passes is not None and passes < 1:
            raise SettingError(
                "head.passes", f"{passes} passes refine nothing", "Use 1 or more, or null to draw token by token"
            )
        if rounds < 0:
            raise SettingError("head.rounds", f"{rounds} is no number of rounds", "Use 0 or more (xPress: 3)")
        self.rank = rank
        self.expansion = expansion
        self.passes = passes
        self.rounds = rounds
        self.zero_readout = zero_readout
        self.init_std = init_std
        self.distributions = ("main", "base", *(f"round_{j + 1}" for j in range(rounds)))

    def build(self, config: DraftConfig) -> None:
        tokens, columns = num_columns(config)
        width, rank, inner = config.hidden_size, self.rank, self.rank * self.expansion
        self._first_slot, slots = config.alignment.first_slot, config.alignment.num_drafts
        self.token_embed = nn.Embedding(tokens, rank)
        self.down_h, self.down_g = (nn.Linear(width, rank, bias=False) for _ in range(2))
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix = nn.Parameter(torch.zeros(rank, slots, slots))
        self.mlp_gate, self.mlp_up = (nn.Linear(rank, inner, bias=False) for _ in range(2))
        self.mlp_down = nn.Linear(inner, rank, bias=False)
        self.readout = nn.Linear(rank, columns, bias=False)
        initialise(self, self.init_std)
        nn.init.zeros_(self.mix)
        if self.zero_readout:
            nn.init.zeros_(self.readout.weight)

    def settles(self, num_drafts: int) -> bool:
        return self.passes is None or self.passes >= num_drafts

    def outputs(self, hidden: Float[Tensor, "B N K H"], layout: BlockLayout, lm: LanguageHead) -> HeadOutput:
        base, first = View.of(hidden, layout.rows, lm), self._first_slot
        slots = self._slots(hidden[:, :, first:])
        known = layout.prev_ids[:, :, first:]

        def compose(hidden: Tensor, refined: Tensor, readout: Tensor) -> Tensor:
            return lm.logits(hidden) + nn.functional.linear(refined, readout)

        def view(known: Int[Tensor, "B N D"]) -> View:
            refined = nn.functional.pad(self._refined(self._inputs(slots, known)), (0, 0, first, 0))
            per_row = (base.per_row[0], refined.flatten(0, 2).index_select(0, layout.rows))
            return View(per_row, layout.rows, base.shape, lm, shared=(self.readout.weight,), compose=compose)

        views = {"main": view(known), "base": base}
        last = base
        for j in range(self.rounds):
            (found,) = last.ask(Argmax())
            before = found[:, :, first:-1]  # of the slot before; the first one's is the root
            drafted = torch.where(before >= 0, before, known[:, :, 1:])
            last = view(torch.cat([known[:, :, :1], drafted], dim=2))
            views[f"round_{j + 1}"] = last
        return HeadOutput(views)

    def open(self, hidden: Float[Tensor, "B D H"], roots: Int[Tensor, " B"], lm: LanguageHead) -> Scores:
        base, slots = lm.logits(hidden), self._slots(hidden)

        def step(state: Any, tokens: Int[Tensor, "B W"], depth: int) -> tuple[Scores, Any]:
            slot = slots[:, depth, None].expand(*tokens.shape, -1)
            state = torch.cat([state, self._inputs(slot, tokens)[:, :, None]], dim=2)
            refined = self._refined(state, last_only=True)[:, :, 0]
            return Scores(base[:, depth, None] + self.readout(refined), lm.ids), state

        def draw(choose: Callable[[Scores], Int[Tensor, "B D"]]) -> tuple[Int[Tensor, "B D"], Scores]:
            laws = Scores(base, lm.ids)
            for _ in range(self.passes or 0):
                before = torch.cat([roots[:, None], choose(laws)[:, :-1]], dim=1)
                refined = self._refined(self._inputs(slots, before)[:, None])[:, 0]
                laws = Scores(base + self.readout(refined), lm.ids)
            return choose(laws), laws

        none = slots.new_zeros(len(roots), 1, 0, self.rank)
        return Scores(base, lm.ids, state=none, step=step, draw=None if self.passes is None else draw)

    def _slots(self, hidden: Float[Tensor, "*blocks D H"]) -> Float[Tensor, "*blocks D s"]:
        """What is known of the slots of a block before any of its tokens is, ``s = 2 rank``."""
        whole = self.down_g(hidden.mean(-2, keepdim=True)).expand(*hidden.shape[:-1], self.rank)
        return torch.cat([self.down_h(hidden), whole], dim=-1)

    def _inputs(self, slots: Float[Tensor, "*lanes s"], before: Int[Tensor, "*lanes"]) -> Float[Tensor, "*lanes r"]:
        known = self.token_embed(before)
        return self.in_proj(torch.cat([slots, known.to(slots.dtype)], dim=-1))

    def _refined(self, x: Float[Tensor, "B N D r"], last_only: bool = False) -> Float[Tensor, "B N d r"]:
        """The features of the ``D`` first slots of every block, or of the last one of them."""
        size, missing = x.shape[2], max(0, x.shape[2] - self.mix.shape[1])
        mix = nn.functional.pad(self.mix, (0, missing, 0, missing))[:, :size, :size].tril()
        if last_only:
            mix = mix[:, -1:]
        mixed = x[:, :, -mix.shape[1] :] + torch.einsum("ckj,bnjc->bnkc", mix, x)
        return mixed + self.mlp_down(nn.functional.silu(self.mlp_gate(mixed)) * self.mlp_up(mixed))
