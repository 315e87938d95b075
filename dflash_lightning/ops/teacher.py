"""The target as a teacher: its own law of the token that each slot is labelled with."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.ops.candidates import logits_at
from dflash_lightning.ops.chunks import CHUNK_BYTES, chunk_bytes, cut
from dflash_lightning.ops.language_head import LanguageHead
from dflash_lightning.ops.requests import LOG_FLOOR, Chunk
from dflash_lightning.types import BlockLayout


class TeacherLaw:
    """The target's distributions at the rows of a chunk, over the columns of the draft's head.

    Args:
        columns: logits [r, c] of the tokens that the draft can express, divided by the temperature.
        log_normaliser: log-sum-exp [r] over the *whole* vocabulary, at the same temperature.
    """

    def __init__(self, columns: Float[Tensor, "r c"], log_normaliser: Float[Tensor, " r"]) -> None:
        self._columns = columns
        self._log_normaliser = log_normaliser

    @property
    def log_probs(self) -> Float[Tensor, "r c"]:
        """Log-probabilities of the draft's tokens under the *whole* law, made anew."""
        return self._columns - self._log_normaliser[:, None]

    @cached_property
    def probs(self) -> Float[Tensor, "r c"]:
        """Probabilities of the draft's tokens under the *whole* law: of a reduced vocabulary they sum below 1."""
        return self.log_probs.clamp_(min=LOG_FLOOR).exp_()

    @cached_property
    def log_probs_within(self) -> Float[Tensor, "r c"]:
        """Log-probabilities of the law given that the token is one of the draft's: they sum to 1."""
        return self._columns - self._columns.logsumexp(-1, keepdim=True)

    @cached_property
    def probs_within(self) -> Float[Tensor, "r c"]:
        """Probabilities of the law given that the token is one of the draft's."""
        return self.log_probs_within.clamp(min=LOG_FLOOR).exp_()


@dataclass(eq=False)
class Teacher:
    """The target's law of every slot's label: its full head on the row of ``last_hidden`` just before the label.

    That row has seen the tokens up to the one before the label, so its law is the one that decoding verifies the slot
    against. The product is made as the draft's own is: in autocast's dtype where autocast was on when the teacher was
    made, else in the dtype of the target's weights. All that is made of it is fp32 (or wider) and carries no gradient.
    In bfloat16 a law of SmolLM2 moves by 1.2 % (total variation, mean over 400 rows of text) without a bias, and the
    likeliest token in 2 % of the rows, those whose two best logits are less than .1 apart.

    The whole vocabulary is needed for the normaliser; of the logits, only the draft's columns are. So under a reduced
    head the scored slots are read once, and every pass over the logits, the backward pass's too, is served from that
    (``Reading``). Under a whole head the logits are made per chunk, and dropped with it.

    Args:
        last_hidden: hidden states after the target's final norm, never rounded by a cache.
        layout: says which row teaches which slot (``label_index - 1``).
        lm: the target's whole language head.
        ids: the tokens of the draft's reduced head, if it has one.
        temperatures: at which laws will be asked. One product serves them and the likeliest tokens, in any order.
    """

    last_hidden: Float[Tensor, "B S H"]
    layout: BlockLayout
    lm: LanguageHead
    ids: Int[Tensor, " c"] | None = None
    temperatures: tuple[float, ...] = ()
    _labels: Tensor | None = field(default=None, init=False, repr=False)
    _readings: list[Reading] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        assert self.lm.ids is None, "a teacher speaks with the target's whole head"
        self._dtype = self.lm.product_dtype(self.last_hidden.device.type)

    def logits(self, rows: Int[Tensor, " r"]) -> Float[Tensor, "r Vt"]:
        """Logits (fp32 or wider) over the whole vocabulary at slots ``rows``, flat indices into B*N*K."""
        shape = self.layout.label_index.shape
        batch = rows // shape[1:].numel()
        before = (self.layout.label_index.flatten()[rows] - 1).clamp(min=0)
        with torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
            weight, bias = self.lm.cast(self._dtype)
            product = torch.nn.functional.linear(self.last_hidden[batch, before].to(self._dtype), weight, bias)
            return self.lm.activate(product.to(torch.promote_types(torch.float32, product.dtype)))

    def logits_at(self, ids: Int[Tensor, "B N K k"]) -> Float[Tensor, "B N K k"]:
        """The target's own logits (not log-probabilities) of a few tokens of every scored slot; 0 elsewhere.

        Reads the rows of those tokens alone, in fp32 (or wider).
        """
        index, rows = self.layout.label_index, self.layout.rows
        hidden = self.last_hidden[rows // index.shape[1:].numel(), (index.flatten()[rows] - 1).clamp(min=0)]
        with torch.no_grad():
            some = ids.flatten(0, 2)[rows]
            columns = self.lm.columns(some.flatten())[0].view(some.shape)
            found = logits_at(self.lm, hidden, columns)
        return found.new_zeros(index.numel(), ids.shape[-1]).index_copy(0, rows, found).view(ids.shape)

    def law(self, chunk: Chunk, temperature: float = 1.0) -> TeacherLaw:
        """The law at the rows of ``chunk``; made once per chunk, however many requests ask."""

        def make() -> TeacherLaw:
            if (reading := self._reading(chunk, temperature)) is not None:
                columns = reading.columns[chunk.span]
                columns = columns if temperature == 1.0 else columns / temperature
                return TeacherLaw(columns, reading.log_normalisers[temperature][chunk.span])
            logits, log_normaliser = self._whole(chunk, temperature)
            return TeacherLaw(logits if chunk.head.ids is None else logits[:, chunk.head.ids], log_normaliser)

        return chunk.remember((self, temperature), make)

    def log_prob(self, chunk: Chunk, labels: Int[Tensor, "B N K"], temperature: float = 1.0) -> Float[Tensor, " r"]:
        """Log-probability of one token per row of ``chunk`` under the whole law; anything where it is no token."""
        reading = self._reading(chunk, temperature) if labels is self.layout.labels else None
        if reading is not None:
            return reading.labels[chunk.span] / temperature - reading.log_normalisers[temperature][chunk.span]
        logits, log_normaliser = self._whole(chunk, temperature)
        return _at(logits, self.lm.columns(chunk.pick(labels))[0]) - log_normaliser

    def labels(self) -> Int[Tensor, "B N K"]:
        """The target's likeliest token at every scored slot, made once; -1 elsewhere."""
        if self._labels is None and self.ids is not None and self.temperatures and self._small(self.ids):
            self._readings.append(self._read(self.ids, self.temperatures))
        if self._labels is None:
            index, rows = self.layout.label_index, self.layout.rows
            found = torch.full((index.numel(),), -1, device=index.device)
            for span in self._spans():
                found[rows[span]] = argmax(self.logits(rows[span]))
            self._labels = found.view(index.shape)
        return self._labels

    def _whole(self, chunk: Chunk, temperature: float) -> tuple[Float[Tensor, "r Vt"], Float[Tensor, " r"]]:
        """Logits of the whole vocabulary at ``temperature``, and their normaliser, for as long as the chunk lives."""

        def make() -> tuple[Tensor, Tensor]:
            logits = chunk.remember((self, "logits"), lambda: self.logits(chunk.rows))
            logits = logits if temperature == 1.0 else logits / temperature
            return logits, logits.logsumexp(-1)

        return chunk.remember((self, "whole", temperature), make)

    def _spans(self) -> list[slice]:
        rows = self.layout.rows
        return cut(len(rows), max(1, chunk_bytes(rows.device) // (4 * len(self.lm.weight))))

    def _small(self, ids: Int[Tensor, " c"]) -> bool:
        return 4 * len(self.layout.rows) * len(ids) <= CHUNK_BYTES

    def _reading(self, chunk: Chunk, temperature: float) -> Reading | None:
        """What is kept of the law at the scored slots; null where it would not be small, or rows are others."""
        ids = chunk.head.ids
        if ids is None or chunk.all_rows is not self.layout.rows or not self._small(ids):
            return None
        for reading in self._readings:
            if reading.ids is ids and temperature in reading.log_normalisers:
                return reading
        wanted = self.temperatures if ids is self.ids and temperature in self.temperatures else (temperature,)
        self._readings.append(self._read(ids, wanted))
        return self._readings[-1]

    @torch.no_grad()
    def _read(self, ids: Int[Tensor, " c"], temperatures: tuple[float, ...]) -> Reading:
        """One product for all scored slots. What it finds of the likeliest tokens is kept as well."""
        index, rows = self.layout.label_index, self.layout.rows
        own, _ = self.lm.columns(self.layout.labels.flatten()[rows])
        best = torch.full((index.numel(),), -1, device=index.device)
        wide = torch.promote_types(torch.float32, self._dtype)
        columns = self.last_hidden.new_empty(len(rows), len(ids), dtype=wide)
        normalisers = {temperature: columns.new_empty(len(rows)) for temperature in temperatures}
        reading = Reading(ids, columns, columns.new_empty(len(rows)), normalisers)
        for span in self._spans():
            logits = self.logits(rows[span])
            best[rows[span]] = argmax(logits)
            torch.index_select(logits, 1, ids, out=columns[span])
            reading.labels[span] = _at(logits, own[span])
            for temperature, normaliser in normalisers.items():
                normaliser[span] = (logits if temperature == 1.0 else logits / temperature).logsumexp(-1)
        self._labels = best.view(index.shape) if self._labels is None else self._labels
        return reading


@dataclass(frozen=True, eq=False)
class Reading:
    """What is kept of the target's law at all scored slots R."""

    ids: Int[Tensor, " c"]
    columns: Float[Tensor, "R c"]  # logits of the draft's tokens
    labels: Float[Tensor, " R"]  # logits of the layout's own labels
    log_normalisers: dict[float, Float[Tensor, " R"]]  # over the whole vocabulary, by temperature


def argmax(logits: Float[Tensor, "r V"], width: int = 256) -> Int[Tensor, " r"]:
    """The first of the largest entries of every row, by way of the largest of runs of ``width`` columns.

    ``torch.argmax`` takes six times as long on a CPU, where only the largest *value* is found with vector instructions.
    """
    whole = logits.shape[1] // width * width
    if whole == 0:
        return logits.argmax(-1)
    tops = logits[:, :whole].unflatten(1, (-1, width)).amax(-1)
    run = tops.argmax(-1)
    inside = logits.gather(1, run[:, None] * width + torch.arange(width, device=run.device)).argmax(-1)
    found = run * width + inside
    if whole == logits.shape[1]:
        return found
    rest = logits[:, whole:]
    last = rest.argmax(-1)
    return torch.where(_at(rest, last) > _at(logits, found), last + whole, found)


def _at(values: Float[Tensor, "r V"], columns: Int[Tensor, " r"]) -> Float[Tensor, " r"]:
    return values.gather(1, columns[:, None]).squeeze(1)
