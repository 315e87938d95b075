"""Contract of the loss axis: sums over slots, divided only after every rank has been counted.

Below the contract: ``SlotwiseLoss``, the base of losses that are one number per slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dflash_lightning.component import Component
from dflash_lightning.errors import SettingError
from dflash_lightning.ops.lm_head import HeadOutput, Teacher, View
from dflash_lightning.schedule import decay_weights
from dflash_lightning.types import BlockLayout, FeatureSpec, SlotTotals, StepContext

Labels = Literal["data", "target", "samples"]
Normalize = Literal["weights", "slots", "blocks", "documents", "document_mean"]


@dataclass(frozen=True)
class LossShare:
    """What a term comes to in one micro-batch, as a share of its accumulation window over all ranks."""

    coef: float
    value: Float[Tensor, ""]
    figures: Mapping[str, Float[Tensor, ""]]  # further ones for the log, without gradient


def total_loss(shares: Mapping[str, LossShare]) -> Float[Tensor, ""]:
    """What is trained on: the weighted sum of the terms."""
    return torch.stack([share.coef * share.value for share in shares.values()]).sum()


class LossTerm(Component, ABC, axis=True):
    """One term of the training loss: ``coefficient(ctx) * numerator / denominator``.

    ``numerator`` is called once per micro-batch with gradients enabled, in or out of autocast. It returns a sum, never
    a mean, and ignores every slot that is not ``layout.valid``, whatever the view returns there. ``denominator`` is
    computed from counts over all ranks and the whole accumulation window, so the gradient does not depend on how a
    batch is split. A term that ``tallies`` does not know before the forward pass what it counts: its denominator is
    ``tally``, summed over all ranks. Such a term is trained with one micro-batch per optimizer step.

    ``labels`` says what a slot is taught: ``"data"`` the token of the training row, ``"target"`` what the target says
    of it, whatever the row holds, ``"samples"`` the token of the row as a *draw* from the target's law at
    ``temperature``. The last estimates an expectation. Other tokens (greedy ones, draws at another temperature or cut
    by top-k or top-p) would bias it, and nothing would show that. So data that is known to hold such tokens is refused.
    """

    labels: Labels = "data"
    temperature: float = 1.0
    coefficient: float
    view: str
    reads: tuple[str, ...] = ()  # the signals of the head that the term trains
    by_block: ClassVar[bool] = False  # whether these are a number per block [B, N], else one per slot [B, N, K]
    tallies: bool = False
    chooses: ClassVar[bool] = False  # whether it reads the head's candidates
    former: ClassVar[Mapping[str, str]] = {
        "needs_samples": 'write labels = "samples", and temperature if it is not 1',
        "numerator.views": "out.views holds them",
        "denominator.layout_shift": "totals count the slots that predict, so there is nothing to shift",
    }

    def coef(self, ctx: StepContext) -> float:
        """Weight of the term at this step; a term that weighs 0 is still evaluated (DDP wants every parameter)."""
        return self.coefficient

    def check_drafts(self, num_drafts: int) -> None:
        """Refuse settings that mean nothing in blocks of at most so many drafts; by default there are none.

        Raises:
            ValueError: names the setting, as ``loss.SETTING``.
        """

    def viewed(self) -> tuple[str, ...]:
        """Names of the head's distributions that the term scores."""
        return (self.view,)

    def required(self) -> FeatureSpec:
        """Target features the term reads; ``last_hidden`` gives it a teacher."""
        return FeatureSpec()

    def laws(self) -> tuple[float, ...]:
        """Temperatures at which the term reads probabilities of the target's law, not its likeliest token alone."""
        return (self.temperature,) if self.required().last_hidden else ()

    @abstractmethod
    def numerator(
        self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None, ctx: StepContext
    ) -> Float[Tensor, ""]:
        """The term's sum over the valid slots of this micro-batch; ``teacher`` is null unless ``required`` asks."""

    @abstractmethod
    def denominator(self, totals: SlotTotals) -> Float[Tensor, ""]:
        """What the sum is divided by; of a term that ``tallies``, the most that can be counted."""

    def tally(self, out: HeadOutput, layout: BlockLayout) -> Float[Tensor, ""]:
        """What this micro-batch adds to the denominator of a term that ``tallies``, without gradient."""
        raise NotImplementedError(f"{self.name} counts before the forward pass")

    def divisor(
        self,
        totals: SlotTotals,
        out: HeadOutput,
        layout: BlockLayout,
        sum_over_ranks: Callable[[Float[Tensor, " Q"]], Float[Tensor, " Q"]],
    ) -> Float[Tensor, ""]:
        """The denominator over all ranks: counted before the forward pass, or after it. Every rank calls this."""
        if not self.tallies:
            return self.denominator(totals)
        return sum_over_ranks(self.tally(out, layout).detach().clone()[None])[0]

    def figures(self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None) -> dict[str, Float[Tensor, ""]]:
        """Further sums of this micro-batch for the log, under the same names each time; divided like the term."""
        return {}

    def in_window(
        self,
        out: HeadOutput,
        layout: BlockLayout,
        teacher: Teacher | None,
        ctx: StepContext,
        totals: SlotTotals,
        sum_over_ranks: Callable[[Float[Tensor, " Q"]], Float[Tensor, " Q"]],
    ) -> LossShare:
        """The term in this micro-batch of a window with ``totals``. Every rank calls this."""
        divisor = self.divisor(totals, out, layout, sum_over_ranks)
        divisor = torch.where(divisor > 0, divisor, 1.0)
        value = self.numerator(out, layout, teacher, ctx) / divisor
        with torch.no_grad():
            figures = {name: found / divisor for name, found in self.figures(out, layout, teacher).items()}
        return LossShare(self.coef(ctx), value, figures)

    def view_of(self, out: HeadOutput) -> View:
        """The view that the term scores.

        Raises:
            ValueError: the head has no view of that name.
        """
        if self.view not in out.views:
            known = sorted(out.views)
            raise SettingError(
                "loss.view", f"the head offers no view {self.view!r}", f"Use one of {known}, or a head that has it"
            )
        return out.views[self.view]


def taught(teacher: Teacher | None) -> Teacher:
    """The teacher of a term that asked for one."""
    assert teacher is not None, "the term reads a teacher, so its required() must ask for last_hidden"
    return teacher


def check_temperature(temperature: float | int) -> float:
    """Refuse a temperature at which a law has no gradient.

    Raises:
        ValueError: it is not positive and finite.
    """
    if not 0 < temperature < float("inf"):
        raise SettingError(
            "loss.temperature", f"{temperature} gives no law to compare", "Use a positive number, e.g. 1"
        )
    return float(temperature)


def slot_weights(predicts: Bool[Tensor, "B N K"], decay: float | None) -> Float[Tensor, "B N K"]:
    """``exp(-j / decay)`` at the ``j``-th predicting slot of every block; what stands at other slots means nothing."""
    order = (predicts.cumsum(-1) - 1).clamp(min=0)
    return decay_weights(predicts.shape[-1], decay, device=predicts.device)[order]


class SlotwiseLoss(LossTerm):
    """``sum(w_j * loss of the slot) / divisor`` over valid slots.

    ``w_j = exp(-j / decay)`` where ``j`` counts the *predicting* slots of a block from 0, valid or not: the first draft
    weighs 1 in both label layouts. A wrong first draft loses the whole block, a wrong last one a single token.
    ``decay`` null weighs all alike; DFlash (arXiv 2602.06036 sec. 4.2) uses 7, 5 and 4 for blocks of 16, 10 and 8.
    ``prefix`` counts only the unbroken run of valid slots at the start of a block (DSpark, arXiv 2607.05147). Slots
    behind an unlabelled one are left out, because decoding never judges a draft there.

    ``normalize`` names the divisor, counted before the forward pass: the sum of the ``weights``, the number of
    ``slots``, of ``blocks`` or of ``documents`` that are counted. ``document_mean`` is the mean over documents of the
    mean over a document's blocks: long documents weigh no more than short ones.
    """

    normalize: Normalize = "weights"

    def __init__(self, *, decay: float | int | None, coefficient: float | int, view: str, prefix: bool = False) -> None:
        if decay is not None and not decay > 0:
            raise SettingError(
                "loss.decay",
                f"{decay} does not decay",
                "It is the number of slots over which the weight falls to 1/e: use a positive number (DFlash: 7 "
                "for block size 16, 5 for 10, 4 for 8), or null for equal weights",
            )
        self.decay = None if decay is None else float(decay)
        self.coefficient = float(coefficient)
        self.view = view
        self.prefix = prefix

    @abstractmethod
    def per_slot(self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None) -> Float[Tensor, "B N K"]:
        """The loss of each slot, in nats or as a probability; anything where the slot is not valid."""

    def weights(self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None) -> Float[Tensor, "B N K"]:
        """What each slot weighs, without gradient; anything where the slot is not valid."""
        return slot_weights(layout.predicts, self.decay)

    def counted(self, layout: BlockLayout) -> Bool[Tensor, "B N K"]:
        """The slots that the loss counts."""
        return unbroken(layout) if self.prefix else layout.valid

    def numerator(
        self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None, ctx: StepContext
    ) -> Float[Tensor, ""]:
        losses = self.per_slot(out, layout, teacher)
        counted = self.counted(layout)
        # where, not a product: an invalid slot may hold NaN, and 0 * NaN is NaN.
        terms = torch.where(counted, self.weights(out, layout, teacher) * losses, 0.0)
        if self.normalize == "document_mean":
            terms = terms.sum(-1) / blocks_of_document(layout, counted.any(-1)).clamp(min=1)
        return terms.sum()

    def denominator(self, totals: SlotTotals) -> Float[Tensor, ""]:
        counts = totals.prefix_valid if self.prefix else totals.valid
        if self.normalize == "weights":
            return (counts * decay_weights(len(counts), self.decay, device=counts.device)).sum()
        if self.normalize == "slots":
            return counts.sum()
        if self.normalize == "blocks":
            return totals.prefix_valid[0] if self.prefix else totals.blocks
        return totals.documents


def check_normalize(normalize: str) -> None:
    """Refuse a divisor that nobody knows.

    Raises:
        ValueError: it is none of ``Normalize``.
    """
    if normalize not in get_args(Normalize):
        raise SettingError("loss.normalize", f"{normalize!r} is unknown", f"Use one of {list(get_args(Normalize))}")


def unbroken(layout: BlockLayout) -> Bool[Tensor, "B N K"]:
    """Valid slots before which every predicting slot of the block is valid too."""
    return (layout.valid | ~layout.predicts).cumprod(-1).bool() & layout.valid


def blocks_of_document(layout: BlockLayout, used: Bool[Tensor, "B N"]) -> Float[Tensor, "B N"]:
    """How many ``used`` blocks there are in the document of each block; anything for padding blocks.

    A document lies within one row, and all its blocks read their context from its first row on.
    """
    starts = torch.where(layout.keep, layout.context_start, torch.iinfo(torch.long).max)  # rising, as documents stand
    before = torch.nn.functional.pad(used.float().cumsum(-1), (1, 0))
    first, last = (torch.searchsorted(starts, starts, right=right) for right in (False, True))
    return before.gather(-1, last) - before.gather(-1, first)
