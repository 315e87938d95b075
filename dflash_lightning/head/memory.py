"""What heads with a memory of the drafted tokens share: a small recurrent network, and sizes of the vocabulary."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from dflash_lightning.draft_config import DraftConfig


class TokenMemory(nn.Module):
    """A gated recurrent unit without biases (Cho et al., arXiv 1406.1078, in the form of ``torch.nn.GRU``).

    ``(r, z) = sigmoid(W x + U s)``, ``n = tanh(W_n x + r * (U_n s))`` and the next state is ``(1 - z) n + z s``. It
    begins with the state 0. ``read`` holds the rows of ``W``, ``keep`` those of ``U``, both in the order r, z, n.
    """

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.read = nn.Linear(width, 3 * size, bias=False)
        self.keep = nn.Linear(size, 3 * size, bias=False)

    def step(self, state: Float[Tensor, "*lanes S"], seen: Float[Tensor, "*lanes H"]) -> Float[Tensor, "*lanes S"]:
        """The state after one more token, of which ``seen`` is the embedding."""
        return self._next(state, self.read(seen.to(state.dtype)))

    def along(self, seen: Float[Tensor, "B N K H"], steps: Bool[Tensor, "B N K"]) -> Float[Tensor, "B N K S"]:
        """The states after each slot of every block; slots that are no ``steps`` leave the state as it is."""
        given = self.read(seen.to(self.read.weight.dtype))
        state = torch.zeros_like(given[:, :, 0, : self.size])
        found = []
        for slot in range(seen.shape[2]):
            after = self._next(state, given[:, :, slot])
            state = torch.where(steps[:, :, slot, None], after, state)
            found.append(state)
        return torch.stack(found, dim=2)

    def _next(self, state: Float[Tensor, "*lanes S"], given: Float[Tensor, "*lanes T"]) -> Float[Tensor, "*lanes S"]:
        reset, keep, new = given.chunk(3, dim=-1)
        reset_before, keep_before, new_before = self.keep(state).chunk(3, dim=-1)
        keep = (keep + keep_before).sigmoid()
        new = (new + (reset + reset_before).sigmoid() * new_before).tanh()
        return (1.0 - keep) * new + keep * state


def num_columns(config: DraftConfig) -> tuple[int, int]:
    """Tokens of the target, and those that the drafter can propose: rows of tables that heads make.

    Raises:
        ValueError: the configuration does not state the first.
    """
    if config.vocab_size is None:
        raise ValueError("vocab_size: the drafter's config states none, but its head has a row for every token.")
    return config.vocab_size, config.draft_vocab_size or config.vocab_size


def initialise(module: nn.Module, std: float) -> None:
    """Draw every matrix of ``module`` (of whatever shape) from a normal law with this deviation."""
    for weight in module.parameters():
        nn.init.normal_(weight, std=std)
