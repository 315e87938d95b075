"""The target as a teacher: its own law of the token that each slot is labelled with."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.ops.language_head import LanguageHead
from dflash_lightning.ops.requests import LOG_FLOOR, Chunk
from dflash_lightning.types import BlockLayout

# Bytes of fp32 logits that exist at a time. On a GPU that is 440 rows of a vocabulary of 152 000, which keep it busy (a
# gradient is as large again). On a CPU, glibc gives blocks above 32 MiB back to the system at every free, and the page
# faults of getting them again cost a fifth of the pass.
CHUNK_BYTES = 256 * 2**20
CPU_CHUNK_BYTES = 28 * 2**20


def chunk_bytes(device: torch.device) -> int:
    """Bytes of logits that exist at a time on ``device``."""
    return CPU_CHUNK_BYTES if device.type == "cpu" else CHUNK_BYTES


def cut(num_rows: int, largest: int) -> list[slice]:
    """Runs of ``num_rows`` rows of about equal length, none longer than ``largest``."""
    pieces = -(-num_rows // largest)
    step = max(1, -(-num_rows // max(1, pieces)))
    return [slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step)]


class TeacherLaw:
    """The target's distributions at the rows of a chunk, over the columns of the draft's head.

    ``logits`` [r, Vt] are of the full vocabulary; ``ids`` are the tokens that the draft can express (null: all).
    """

    def __init__(self, logits: Float[Tensor, "r Vt"], ids: Int[Tensor, " c"] | None, temperature: float) -> None:
        self._logits = logits if temperature == 1.0 else logits / temperature
        self._columns = self._logits if ids is None else self._logits[:, ids]
        self._log_normaliser = self._logits.logsumexp(-1)

    @cached_property
    def probs(self) -> Float[Tensor, "r c"]:
        """Probabilities of the draft's tokens under the *whole* law: of a reduced vocabulary they sum below 1."""
        return (self._columns - self._log_normaliser[:, None]).clamp_(min=LOG_FLOOR).exp_()

    @cached_property
    def log_probs_within(self) -> Float[Tensor, "r c"]:
        """Log-probabilities of the law given that the token is one of the draft's: they sum to 1."""
        return self._columns - self._columns.logsumexp(-1, keepdim=True)

    @cached_property
    def probs_within(self) -> Float[Tensor, "r c"]:
        """Probabilities of the law given that the token is one of the draft's."""
        return self.log_probs_within.clamp(min=LOG_FLOOR).exp_()

    def log_prob(self, tokens: Int[Tensor, " r"]) -> Float[Tensor, " r"]:
        """Log-probability of one token per row under the whole law."""
        return self._logits.gather(1, tokens[:, None]).squeeze(1) - self._log_normaliser


@dataclass(eq=False)
class Teacher:
    """The target's law of every slot's label: its full head on the row of ``last_hidden`` just before the label.

    That row has seen the tokens up to the one before the label, so its law is the one that decoding verifies the slot
    against. Logits are made per chunk of rows in the dtype of the target's weights, with autocast off, and carry no
    gradient.

    Args:
        last_hidden: hidden states after the target's final norm, never rounded by a cache.
        layout: says which row teaches which slot (``label_index - 1``).
        lm: the target's whole language head.
    """

    last_hidden: Float[Tensor, "B S H"]
    layout: BlockLayout
    lm: LanguageHead
    _labels: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        assert self.lm.ids is None, "a teacher speaks with the target's whole head"

    def logits(self, rows: Int[Tensor, " r"]) -> Float[Tensor, "r Vt"]:
        """Logits (fp32 or wider) over the whole vocabulary at slots ``rows``, flat indices into B*N*K."""
        shape = self.layout.label_index.shape
        batch = rows // shape[1:].numel()
        before = (self.layout.label_index.flatten()[rows] - 1).clamp(min=0)
        with torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
            weight, bias = self.lm.cast(self.lm.weight.dtype)
            hidden = self.last_hidden[batch, before].to(weight.dtype)
            product = torch.nn.functional.linear(hidden, weight, bias)
            return self.lm.activate(product.to(torch.promote_types(torch.float32, product.dtype)))

    def law(self, chunk: Chunk, temperature: float = 1.0) -> TeacherLaw:
        """The law at the rows of ``chunk``; made once per chunk, however many requests ask."""
        logits = chunk.remember((self, "logits"), lambda: self.logits(chunk.rows))
        return chunk.remember((self, temperature), lambda: TeacherLaw(logits, chunk.head.ids, temperature))

    def labels(self) -> Int[Tensor, "B N K"]:
        """The target's likeliest token at every scored slot, made once; -1 elsewhere."""
        if self._labels is None:
            index, rows = self.layout.label_index, self.layout.rows
            found = torch.full((index.numel(),), -1, device=index.device)
            largest = max(1, chunk_bytes(rows.device) // (4 * len(self.lm.weight)))
            for span in cut(len(rows), largest):
                found[rows[span]] = self.logits(rows[span]).argmax(-1)
            self._labels = found.view(index.shape)
        return self._labels
