"""Heads that know the tokens drafted before a slot, computed slowly from an export's tensors (see ``conventions``).

DSpark's Markov head, Domino's prefix memory and xPress's refiner. Shares no code with the heads that are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

Weights = Mapping[str, Tensor]
_CONFIDENCE = ("enable_confidence_head", "confidence_head_with_markov")


@dataclass(frozen=True)
class InTurn:
    """Which head it is, and the numbers that its config.json states of it."""

    kind: str
    numbers: Mapping[str, int]

    @classmethod
    def read(cls, stated: Mapping[str, Any]) -> InTurn | None:
        """From the settings of a file, flat ones and those of ``dflash_config`` together; null where there is none.

        Raises:
            ValueError: a DSpark head of another kind than the plain one.
        """
        kind = {"dspark": "markov", "domino": "prefix"}.get(stated.get("projector_type", ""))
        if kind is None and stated.get("xpress_rank"):
            kind = "refiner"
        if kind is None:
            return None
        if kind == "markov" and (stated.get("markov_head_type") or "vanilla") != "vanilla":
            raise ValueError(f"markov_head_type: {stated['markov_head_type']!r} is not written. Export again.")
        names = {
            "markov": ("markov_rank", *_CONFIDENCE),
            "prefix": ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len"),
            "refiner": ("xpress_rank", "xpress_mlp_ratio", "num_jacobi_passes"),
        }[kind]
        if missing := [name for name in names if stated.get(name) is None]:
            raise ValueError(f"config.json states no {missing}, which {kind} heads need. Export again.")
        return cls(kind, {name: int(stated[name]) for name in names})

    def shapes(self, width: int, drafts: int, vocab_size: int, columns: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of its tensors; ``columns`` are the tokens that can be drafted."""
        n = self.numbers
        if self.kind == "markov":
            rank, read = n["markov_rank"], width + n["confidence_head_with_markov"] * n["markov_rank"]
            certain = {"confidence_head.proj.weight": (1, read), "confidence_head.proj.bias": (1,)}
            return {
                "markov_head.markov_w1.weight": (vocab_size, rank),
                "markov_head.markov_w2.weight": (columns, rank),
                **(certain if n["enable_confidence_head"] else {}),
            }
        if self.kind == "prefix":
            size, rank = n["gru_hidden_dim"], n["emb_dim"]
            return {
                "prefix_gru.weight_ih_l0": (3 * size, width),
                "prefix_gru.weight_hh_l0": (3 * size, size),
                "embed_proj.0.weight": (rank, width + size),
                "embed_proj.2.weight": (columns, rank),
            }
        r, at = n["xpress_rank"], "refiner_head"
        inner = r * n["xpress_mlp_ratio"]
        return {
            f"{at}.token_embed.weight": (vocab_size, r),
            f"{at}.down_h.weight": (r, width),
            f"{at}.down_g.weight": (r, width),
            f"{at}.in_proj.weight": (r, 3 * r),
            f"{at}.mix_l": (r, drafts, drafts),
            f"{at}.mlp_gate.weight": (inner, r),
            f"{at}.mlp_up.weight": (inner, r),
            f"{at}.mlp_down.weight": (r, inner),
            f"{at}.readout.weight": (columns, r),
        }

    def walk(
        self,
        weights: Weights,
        hidden: Float[Tensor, "D H"],
        logits: Float[Tensor, "D v"],
        root: int,
        embedding: Float[Tensor, "V H"],
        ids: Int[Tensor, " v"] | None,
    ) -> list[int]:
        """Columns of the tokens that are drafted greedily behind ``root``; ``ids`` are the tokens of the columns."""
        tokens = range(logits.shape[-1]) if ids is None else ids.tolist()
        if self.kind == "refiner":
            return _jacobi(weights, self.numbers["num_jacobi_passes"], hidden, logits, root, tokens)
        if self.kind == "markov":
            before, after = (weights[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
            return _each(logits, root, tokens, lambda slot, last: after @ before[last])
        return _each(logits, root, tokens, _Memory(weights, self.numbers, hidden, embedding.float()))


def _each(
    logits: Float[Tensor, "D v"], root: int, tokens: Any, bias: Callable[[int, int], Tensor | float]
) -> list[int]:
    """The likeliest token of each slot, given the one before: ``bias`` of slot and token is added to the logits."""
    last, columns = root, []
    for slot, law in enumerate(logits):
        columns.append(int((law + bias(slot, last)).argmax()))
        last = int(tokens[columns[-1]])
    return columns


class _Memory:
    """Domino's correction: a gated recurrent unit reads the token before each slot, slot after slot."""

    def __init__(self, weights: Weights, numbers: Mapping[str, int], hidden: Tensor, embedding: Tensor) -> None:
        self.weights, self.hidden, self.embedding = weights, hidden, embedding
        self.pure = numbers["pure_draft_prefix_len"]
        self.state = hidden.new_zeros(numbers["gru_hidden_dim"])

    def __call__(self, slot: int, last: int) -> Tensor | float:
        given = self.weights["prefix_gru.weight_ih_l0"] @ self.embedding[last].to(self.hidden.device)
        kept = self.weights["prefix_gru.weight_hh_l0"] @ self.state
        (r, z, n), (kept_r, kept_z, kept_n) = given.chunk(3), kept.chunk(3)
        update = torch.sigmoid(z + kept_z)
        self.state = (1 - update) * torch.tanh(n + torch.sigmoid(r + kept_r) * kept_n) + update * self.state
        if slot < self.pure:
            return 0.0
        read = self.weights["embed_proj.0.weight"] @ torch.cat([self.hidden[slot], self.state])
        return self.weights["embed_proj.2.weight"] @ F.silu(read)


def _jacobi(
    weights: Weights, passes: int, hidden: Float[Tensor, "D H"], logits: Float[Tensor, "D v"], root: int, tokens: Any
) -> list[int]:
    """xPress: all slots at once from the plain logits, then again and again given the tokens of the pass before."""
    own = {name.removeprefix("refiner_head."): value for name, value in weights.items()}
    columns = logits.argmax(-1).tolist()
    whole = own["down_g.weight"] @ hidden.mean(0)
    for _ in range(passes):
        seen = [root, *(int(tokens[column]) for column in columns[:-1])]
        x = [
            own["in_proj.weight"] @ torch.cat([own["down_h.weight"] @ state, whole, own["token_embed.weight"][token]])
            for state, token in zip(hidden, seen, strict=True)
        ]
        found = []
        for slot in range(len(x)):
            u = x[slot] + sum(own["mix_l"][:, slot, j] * x[j] for j in range(slot + 1))
            y = u + own["mlp_down.weight"] @ (F.silu(own["mlp_gate.weight"] @ u) * (own["mlp_up.weight"] @ u))
            found.append(int((logits[slot] + own["readout.weight"] @ y).argmax()))
        columns = found
    return columns
