"""The likeliest tokens of a view's slots with their logits, at the price of the pass that its losses make anyway."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from dflash_lightning.ops.candidates import logits_at
from dflash_lightning.ops.lm_head import View
from dflash_lightning.ops.requests import Detached, LabelLogProb, LogNormaliser, TopK, TopLogits


@dataclass
class Likeliest:
    """Of every row of a view: the ``k`` likeliest tokens, best first, and what the view's law says of them.

    ``logits`` and ``log_probs`` (over the whole vocabulary of the view) carry the view's gradient; ``columns`` are the
    logit columns of ``ids``.
    """

    ids: Int[Tensor, "R k"]
    columns: Int[Tensor, "R k"]
    logits: Float[Tensor, "R k"]
    log_probs: Float[Tensor, "R k"]


def likeliest(view: View, labels: Int[Tensor, "B N K"], k: int) -> Likeliest:
    """The ``k`` likeliest tokens of each row of a plain ``view``.

    Values are those of the one pass over the logits in which ``log p(label)`` is answered too, which a loss will ask.
    Gradients need no pass of their own: a logit's is a row of the head, and that of the normaliser is the label's,
    ``log sum exp = logit(label) - log p(label)``. Where the head has no row for a label the normaliser passes none on;
    such a slot is not valid.
    """
    assert view.compose is None, "the gradients here are those of the language head on the hidden rows"
    found = view.ask(TopK(k), TopLogits(k), Detached(LogNormaliser()), LabelLogProb(labels))
    ids, logits, normaliser, own = (answer.flatten(0, 2).index_select(0, view.rows) for answer in found)
    columns = view.lm.columns(ids.flatten())[0].view(ids.shape)
    label_columns, known = view.lm.columns(labels.flatten().index_select(0, view.rows))
    again = logits_at(view.lm, view.per_row[0], torch.cat([columns, label_columns[:, None]], dim=1))
    logits = with_gradient(logits, again[:, :-1])
    normaliser = with_gradient(normaliser, torch.where(known, again[:, -1] - own, 0.0))
    return Likeliest(ids, columns, logits, logits - normaliser[:, None])


def with_gradient(value: Float[Tensor, "*rows"], same: Float[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """``value`` with the gradient of ``same``, which was computed another way."""
    return value + (same - same.detach()).to(value.dtype) if same.requires_grad else value


def to_slots(rows: Shaped[Tensor, R * width], view: View, fill: float | int) -> Shaped[Tensor, "B N K *width"]:
    """An entry for each of the view's rows, put where the slot stands; ``fill`` elsewhere."""
    size = torch.Size(view.shape)
    empty = rows.new_full((size.numel(), *rows.shape[1:]), fill)
    return empty.index_copy(0, view.rows, rows).view(*size, *rows.shape[1:])
